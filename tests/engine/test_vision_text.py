"""Texts after images equal mlx-vlm's, with every draft and among other requests."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_speculation import (
    CascadeDraft,
    EagleDraft,
    LookupDraft,
    PrefixCache,
)
from mlx_speculation.caches import KVQuantization, position
from mlx_speculation.errors import InvalidRequestError, UnsupportedModelError
from mlx_speculation.models import Lane
from mlx_speculation.models.vision import ImageForward, ImagePrompt, VisionTarget
from mlx_speculation.models.vision.families import SERVED
from support.covering import others_slow
from support.drafters.scripted_drafter import TurningDrafter
from support.models import eagle_checkpoints, tiny_models
from support.models.mlx_vlm_decoding import their_text
from support.models.tiny_vision import (
    VOCAB,
    WITHOUT_MLX_VLM,
    grid,
    prompt_with,
    tiny,
)
from support.models.vision_requests import (
    GREEDY,
    NONE,
    ONE,
    SAMPLED,
    TOKENS,
    TWO,
    generator,
    in_turns,
    options,
    plain_text,
    request_of,
    target,
    text,
)

pytestmark = WITHOUT_MLX_VLM

# Families that have positions with three axes, layers with states, or windows.
SOME = ("qwen2_5_vl", "qwen3_5", "gemma3")


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "phi3_v", "molmo"])
def test_a_draft_model_reads_the_text_without_the_images(name: str) -> None:
    draft = tiny_models.build("llama", vocab=VOCAB)
    model, prompt = target(name), prompt_with(name, TWO)
    drafted = generator(model, draft=draft, draft_length=3)
    for sampling in (GREEDY, SAMPLED):
        stream = drafted.stream(prompt, **options(sampling))
        got = [chunk.token for chunk in stream]
        assert got == plain_text(name, TWO, sampling)
        assert stream.stats.drafted
        assert not stream.stats.drafter_faults
        lane = stream.request.drafter.inner.lane  # type: ignore[union-attr]
        slots = sum(stop - start for start, stop in stream.request.sequence.images)
        assert lane.caches[0].offset == lane.seen - slots


@pytest.mark.parametrize("name", others_slow([*SOME, "llava", "phi3_v"], SOME))
def test_an_eagle_head_leaves_the_text_as_it_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head reads the target's states at all positions, images included."""
    monkeypatch.setattr(eagle_checkpoints, "VOCAB", VOCAB)
    model, prompt = target(name), prompt_with(name, TWO)
    folder = eagle_checkpoints.write_eagle(tmp_path / "head", "specforge", (0, 1))
    head = EagleDraft.from_folder(folder, model)
    cascade = CascadeDraft(LookupDraft(), EagleDraft.from_folder(folder, model))
    for draft, sampling in ((head, GREEDY), (head, SAMPLED), (cascade, GREEDY)):
        made = generator(model, draft=draft, draft_length=3)
        result = made.generate(prompt, **options(sampling))
        assert result.tokens == plain_text(name, TWO, sampling)
        assert result.stats.drafted
        assert not result.stats.drafter_faults


@pytest.mark.parametrize(
    "sizes", [pytest.param(ONE, marks=pytest.mark.slow), TWO], ids=["one", "two"]
)
@pytest.mark.parametrize("name", grid(n for n in SERVED if SERVED[n].one_pass))
def test_tokens_of_an_image_see_each_other_where_the_config_says_so(
    name: str, sizes: list[tuple[int, int]]
) -> None:
    """The image is longer than the window, and read at once at every chunk size."""
    both = tiny(name, use_bidirectional_attention="vision")
    made = prompt_with(name, sizes)
    kinds = (made.input_ids == both.placeholder).astype(mx.int32)
    inputs = {**made.inputs, "mm_token_type_ids": kinds}
    prompt = ImagePrompt(made.input_ids, inputs)
    expected = their_text(both, prompt, TOKENS)
    assert expected != their_text(target(name), made, TOKENS)
    prefixes = PrefixCache(1 << 28, every=4)
    shared = generator(both, draft="lookup", draft_length=2, prefix_cache=prefixes)
    for _ in range(2):
        result = shared.generate(prompt, **options())
        assert result.tokens == expected
        assert result.stats.reused == 0
    drawn = text(both, prompt, SAMPLED)
    draft = TurningDrafter(prompt.tokens + drawn, VOCAB)
    assert text(both, made, SAMPLED, draft=draft, draft_length=3) == drawn
    alone = [text(both, each, GREEDY) for each in (prompt, prompt_with(name, NONE))]
    plain = request_of(prompt_with(name, NONE))
    streams = [shared.stream(each, **options()) for each in (prompt, plain)]
    assert in_turns(*streams) == alone


class FailingTarget(VisionTarget):
    """A target with one forward that fails after it has written."""

    left = 1 << 30

    def forward(self, *args: Any, **more: Any) -> mx.array:
        logits = super().forward(*args, **more)
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("no memory")
        return logits


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5", "gemma3"])
def test_a_forward_that_fails_leaves_what_was_committed(name: str) -> None:
    """After a failure in prompt or round, a lane can continue from what it has kept."""
    prompt = prompt_with(name, ONE)
    expected = plain_text(name, ONE)
    failing = FailingTarget(target(name).vlm)
    known = prompt.tokens + expected
    forwards = -(len(prompt.tokens) // -9)  # of the prompt
    for place in range(1, forwards + 4):
        draft = TurningDrafter(known, VOCAB, seed=place)
        made = generator(failing, draft=draft, draft_length=3)
        stream = made.stream(prompt, **options())
        failing.left = place
        with pytest.raises(RuntimeError, match="no memory"):
            list(stream)
        failing.left = 1 << 30
        assert stream.result.finish_reason == "error"
        kept = stream.request.target
        assert stream.cached_tokens == known[: kept.seen]
        assert position(kept.caches) == kept.seen
        rest, whole = known[kept.seen :], Lane(failing, sliding="slack")
        whole.run = ImageForward(failing, prompt)
        whole.feed(known[: kept.seen], step=5)
        with kept.begin() as one, whole.begin() as other:
            fed = mx.array(rest[:1])
            assert mx.allclose(one.forward(fed), other.forward(fed), atol=2e-4).item()
    made = generator(failing)
    assert made.generate(prompt, **options()).tokens == expected


@pytest.mark.parametrize("name", others_slow([*SOME, "qwen3_vl", "smolvlm"], SOME))
def test_a_second_turn_resumes_the_first_after_its_images(name: str) -> None:
    model, first = target(name), prompt_with(name, TWO)
    prefixes = PrefixCache(1 << 28, every=8)
    made = generator(model, draft="lookup", draft_length=2, prefix_cache=prefixes)
    answer = made.generate(first, **options()).tokens
    ids = [*first.tokens, *answer, *b" and then?"]
    second = ImagePrompt(mx.array([ids]), first.inputs)
    result = made.generate(second, **options())
    assert result.stats.reused >= len(first.tokens)
    assert result.tokens == text(model, second, GREEDY)
    again = made.generate(first, **options())
    assert again.stats.reused
    assert again.tokens == answer


@pytest.mark.parametrize("name", others_slow([*SOME, "pixtral"], SOME))
def test_a_head_after_images_drafts_warm_as_it_does_cold(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts with equal ids and different images count as two texts."""
    monkeypatch.setattr(eagle_checkpoints, "VOCAB", VOCAB)
    model, prompt = target(name), prompt_with(name, ONE)
    folder = eagle_checkpoints.write_eagle(tmp_path / "head", "specforge", (0, 1))
    head = EagleDraft.from_folder(folder, model)
    prefixes = PrefixCache(1 << 28, every=8)
    cold, warm = (
        generator(model, draft=head, draft_length=3, prefix_cache=each)
        for each in (None, prefixes)
    )
    answer = bytes(t for t in cold.generate(prompt, **options()).tokens if t < 256)
    turn = [*prompt.tokens, *answer, *b" and then?"]
    other = prompt_with(name, ONE, seed=5)
    further = ImagePrompt(mx.array([turn]), prompt.inputs)
    for each in (prompt, further, other, prompt):
        wanted = cold.generate(each, **options())
        result = warm.generate(each, **options())
        assert result.tokens == wanted.tokens
        assert not result.stats.drafter_faults
        assert result.stats.rounds == wanted.stats.rounds
        assert result.stats.reached == wanted.stats.reached
    assert result.stats.reused
    assert any(1 in node.rows for node in prefixes._tree.nodes())


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "pixtral"])
def test_another_image_shares_no_more_than_the_text_before_it(name: str) -> None:
    model = target(name)
    one, other = prompt_with(name, ONE), prompt_with(name, ONE, seed=5)
    assert one.tokens == other.tokens
    texts = [plain_text(name, ONE, seed=seed) for seed in (0, 5)]
    assert texts[0] != texts[1]
    made = generator(model, prefix_cache=PrefixCache(1 << 28, every=4))
    assert made.generate(one, **options()).tokens == texts[0]
    result = made.generate(other, **options())
    assert result.stats.reused <= one.slots(model.placeholder)[0][0]
    assert result.tokens == texts[1]
    plain = made.generate(one.tokens, **options())
    assert plain.stats.reused <= one.slots(model.placeholder)[0][0]


def test_rows_of_a_batch_write_what_each_does_alone() -> None:
    model = target("qwen3_vl")
    prompts = [prompt_with("qwen3_vl", sizes) for sizes in (NONE, ONE, TWO)]
    made = generator(model, draft="lookup", draft_length=2)
    results = made.generate_batch([request_of(p) for p in prompts], **options())
    alone = [plain_text("qwen3_vl", sizes) for sizes in (NONE, ONE, TWO)]
    assert [r.tokens for r in results] == alone


def test_what_does_not_go_with_images_is_refused() -> None:
    model, prompt = target("qwen2_5_vl"), prompt_with("qwen2_5_vl", ONE)
    made = generator(model)
    caches = model.make_cache()
    with pytest.raises(InvalidRequestError, match="prompt_cache was passed"):
        made.stream(prompt, prompt_cache=caches)
    with pytest.raises(InvalidRequestError, match="prompt_cache was passed"):
        made.stream([1, 2], prompt_cache=caches)
    windows = generator(target("gemma3"))
    with pytest.raises(InvalidRequestError, match="cannot have quantized caches"):
        windows.stream([1, 2], kv_quantization=KVQuantization(bits=4))
    with pytest.raises(InvalidRequestError, match="which has its own"):
        made.stream(prompt, images=[b"picture"])
    cut = ImagePrompt(prompt.input_ids[:, :8], prompt.inputs)
    with pytest.raises(InvalidRequestError, match="end with an image"):
        made.stream(cut)
    with pytest.raises(InvalidRequestError, match="0 tensors of images"):
        made.stream(ImagePrompt(prompt.input_ids))
    text_only = generator(tiny_models.build("llama", vocab=VOCAB))
    with pytest.raises(InvalidRequestError, match="reads text only"):
        text_only.stream(prompt)
    with pytest.raises(UnsupportedModelError, match="exact"):
        generator(model, exact=True)


def test_text_may_follow_caches_that_hold_text() -> None:
    model = target("qwen2_5_vl")
    made, caches = generator(model), target("qwen2_5_vl").make_cache()
    ids = [*b"some text that goes on"]
    expected = made.generate(ids, **options()).tokens
    made.generate(
        ids[:8], **options(max_tokens=0), prompt_cache=caches, cached_tokens=[]
    )
    result = made.generate(
        ids[8:], **options(), prompt_cache=caches, cached_tokens=ids[:8]
    )
    assert result.tokens == expected

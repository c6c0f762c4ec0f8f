"""Texts after images: mlx-vlm's own, whatever drafts, and whoever else is served."""

from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_speculation import (
    Cascade,
    EagleDraft,
    LookupDrafter,
    PrefixCache,
    Sampling,
    SpeculativeGenerator,
)
from mlx_speculation.caches import KVQuantization, position, states
from mlx_speculation.engine.stream import Stream
from mlx_speculation.errors import InvalidRequestError, UnsupportedModelError
from mlx_speculation.models import Lane
from mlx_speculation.models.vision import ImageForward, ImagePrompt, VisionTarget
from support.drafters.scripted_drafter import ScriptedDrafter, TurningDrafter
from support.models import eagle_checkpoints, tiny_models
from support.models.mlx_vlm_decoding import their_text
from support.models.tiny_vision import (
    FAMILIES,
    QWEN,
    VOCAB,
    WITHOUT_MLX_VLM,
    prompt_with,
    tiny,
    tokenizer,
)

pytestmark = WITHOUT_MLX_VLM

GREEDY, SAMPLED = Sampling(seed=0), Sampling(temperature=0.8, top_p=0.9, seed=11)
TOKENS = 16
NONE: list[tuple[int, int]] = []
ONE = [(4, 6)]
TWO = [(2, 4), (6, 4)]


@cache
def target(name: str) -> VisionTarget:
    return tiny(name)


def generator(model: Any, **options: Any) -> SpeculativeGenerator:
    return SpeculativeGenerator(model, tokenizer(), **options)


def asked(prompt: ImagePrompt) -> Any:
    """Return a prompt as a user would pass it: without images it is ids."""
    return prompt if prompt.inputs else prompt.tokens


def options(sampling: Sampling = GREEDY, **more: Any) -> dict[str, Any]:
    chosen = {"max_tokens": TOKENS, "sampling": sampling, "stop_tokens": ()}
    return {**chosen, "prefill_step_size": 5, **more}


def text(
    model: Any, prompt: ImagePrompt, sampling: Sampling, **draft: Any
) -> list[int]:
    made = generator(model, **draft)
    return made.generate(asked(prompt), **options(sampling)).tokens


@pytest.mark.parametrize("sizes", [NONE, ONE, TWO], ids=["none", "one", "two"])
@pytest.mark.parametrize("name", FAMILIES)
def test_text_is_that_of_mlx_vlm_under_every_draft(
    name: str, sizes: list[tuple[int, int]]
) -> None:
    model, prompt = target(name), prompt_with(name, sizes)
    plain = text(model, prompt, GREEDY)
    assert plain == their_text(model, prompt, TOKENS)
    for sampling in (GREEDY, SAMPLED):
        expected = plain if sampling.greedy else text(model, prompt, sampling)
        known = prompt.tokens + expected
        drafts = [TurningDrafter(known, VOCAB), LookupDrafter()]
        if sampling.greedy:
            drafts += [ScriptedDrafter(known, share, VOCAB) for share in (1.0, 0.0)]
        for draft in drafts:
            got = text(model, prompt, sampling, draft=draft, draft_length=3)
            assert got == expected, type(draft).__name__


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_a_draft_model_reads_the_text_without_the_images(name: str) -> None:
    draft = tiny_models.build("llama", vocab=VOCAB)
    model, prompt = target(name), prompt_with(name, TWO)
    drafted = generator(model, draft=draft, draft_length=3)
    for sampling in (GREEDY, SAMPLED):
        stream = drafted.stream(prompt, **options(sampling))
        got = [chunk.token for chunk in stream]
        assert got == text(model, prompt, sampling)
        assert stream.stats.drafted
        assert not stream.stats.drafter_faults
        lane = stream.request.drafter.inner.lane  # type: ignore[union-attr]
        slots = sum(stop - start for start, stop in stream.request.sequence.images)
        assert lane.caches[0].offset == lane.seen - slots


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_5", "gemma3", "llava"])
def test_an_eagle_head_leaves_the_text_as_it_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the target's states of all slots, images included."""
    monkeypatch.setattr(eagle_checkpoints, "VOCAB", VOCAB)
    model, prompt = target(name), prompt_with(name, TWO)
    folder = eagle_checkpoints.write_eagle(tmp_path / "head", "specforge")
    drafts = [
        EagleDraft.from_folder(folder, model),
        Cascade(LookupDrafter(), EagleDraft.from_folder(folder, model)),
    ]
    for draft in drafts:
        for sampling in (GREEDY, SAMPLED):
            made = generator(model, draft=draft, draft_length=3)
            result = made.generate(prompt, **options(sampling))
            assert result.tokens == text(model, prompt, sampling)
            assert result.stats.drafted
            assert not result.stats.drafter_faults


@pytest.mark.parametrize("sizes", [ONE, TWO], ids=["one", "two"])
def test_tokens_of_an_image_see_each_other_where_the_config_says_so(
    sizes: list[tuple[int, int]],
) -> None:
    """Longer than the window, and read at once, whatever the step."""
    both = tiny("gemma4", use_bidirectional_attention="vision")
    made = prompt_with("gemma4", sizes)
    kinds = (made.input_ids == both.placeholder).astype(mx.int32)
    inputs = {**made.inputs, "mm_token_type_ids": kinds}
    prompt = ImagePrompt(made.input_ids, inputs)
    expected = their_text(both, prompt, TOKENS)
    assert expected != their_text(target("gemma4"), made, TOKENS)
    prefixes = PrefixCache(1 << 28, every=4)
    shared = generator(both, draft="lookup", draft_length=2, prefix_cache=prefixes)
    for _ in range(2):
        result = shared.generate(prompt, **options())
        assert result.tokens == expected
        assert result.stats.reused == 0
    drawn = text(both, prompt, SAMPLED)
    draft = TurningDrafter(prompt.tokens + drawn, VOCAB)
    assert text(both, made, SAMPLED, draft=draft, draft_length=3) == drawn
    alone = [text(both, each, GREEDY) for each in (prompt, prompt_with("gemma4", NONE))]
    plain = asked(prompt_with("gemma4", NONE))
    streams = [shared.stream(each, **options()) for each in (prompt, plain)]
    assert in_turns(*streams) == alone


def in_turns(*streams: Stream) -> list[list[int]]:
    rows = zip_longest(*streams)
    columns = zip(*rows, strict=True)
    return [[chunk.token for chunk in column if chunk] for column in columns]


@pytest.mark.parametrize("name", FAMILIES)
def test_requests_in_turns_write_what_each_does_alone(name: str) -> None:
    """mlx-vlm keeps positions on the model: those of the request before."""
    prompts = [
        prompt_with(name, ONE),
        prompt_with(name, TWO, seed=1),
        prompt_with(name, NONE, text="A text without a picture, of some length."),
    ]
    alone = [text(tiny(name), each, GREEDY) for each in prompts]
    shared = generator(target(name), draft="lookup", draft_length=2)
    assert in_turns(*(shared.stream(asked(p), **options()) for p in prompts)) == alone


@pytest.mark.parametrize("name", sorted(QWEN))
def test_positions_on_the_model_are_not_read(name: str) -> None:
    model = tiny(name)
    prompt = prompt_with(name, ONE)
    plain = prompt_with(name, NONE)
    expected = [text(model, each, GREEDY) for each in (prompt, plain)]

    class Poisoned(VisionTarget):
        def forward(self, *args: Any, **more: Any) -> mx.array:
            self.language_model._rope_deltas = mx.array([[999]])
            self.language_model._position_ids = mx.full((3, 1, 999), 77)
            return super().forward(*args, **more)

    poisoned = Poisoned(model.vlm)
    assert [text(poisoned, each, GREEDY) for each in (prompt, plain)] == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_chunks_of_a_prompt_are_one_pass_and_rounds_leave_what_steps_leave(
    name: str,
) -> None:
    """A lane after rounds, one of which failed, holds what a lane of steps holds."""
    model, prompt = target(name), prompt_with(name, TWO)
    rest = [70, 80, 90, 100, 110, 120]

    def fed(step: int) -> Lane:
        lane = Lane(model, sliding="slack")
        lane.run = ImageForward(model, prompt)
        lane.feed(prompt.tokens, step=step)
        return lane

    steps, rounds = fed(1000), fed(3)
    for token in rest:
        steps.feed([token])
    kept = 0
    while kept < len(rest):
        keep = min(2, len(rest) - kept)
        with rounds.begin() as failed:
            failed.forward(mx.array([1, 2, 3]))
        with rounds.begin() as round_:
            round_.forward(mx.array([*rest[kept : kept + keep], 5, 6]))
            round_.commit(keep)
        kept += keep
    with steps.begin() as one, rounds.begin() as other:
        logits = one.forward(mx.array([9])), other.forward(mx.array([9]))
        assert mx.allclose(*logits, atol=2e-4).item()
    for held in (states(steps.caches), states(rounds.caches)):
        mx.eval(held)
    assert steps.seen == rounds.seen


class FailingTarget(VisionTarget):
    """A target one of whose forwards fails, after it has written."""

    left = 1 << 30

    def forward(self, *args: Any, **more: Any) -> mx.array:
        logits = super().forward(*args, **more)
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("no memory")
        return logits


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5", "gemma3"])
def test_a_forward_that_fails_leaves_what_was_committed(name: str) -> None:
    """Wherever it does, in the prompt or in a round: a lane goes on from there."""
    prompt = prompt_with(name, ONE)
    expected = text(target(name), prompt, GREEDY)
    failing = FailingTarget(target(name).vlm)
    known = prompt.tokens + expected
    for place in range(1, 12):
        draft = TurningDrafter(known, VOCAB, seed=place)
        made = generator(failing, draft=draft, draft_length=3)
        stream = made.stream(prompt, **options())
        failing.left = place
        with pytest.raises(RuntimeError, match="no memory"):
            list(stream)
        failing.left = 1 << 30
        assert stream.result.finish_reason == "error"
        held = stream.request.target
        assert stream.cached_tokens == known[: held.seen]
        assert position(held.caches) == held.seen
        rest, whole = known[held.seen :], Lane(failing, sliding="slack")
        whole.run = ImageForward(failing, prompt)
        whole.feed(known[: held.seen], step=5)
        with held.begin() as one, whole.begin() as other:
            fed = mx.array(rest[:1])
            assert mx.allclose(one.forward(fed), other.forward(fed), atol=2e-4).item()
    made = generator(failing)
    assert made.generate(prompt, **options()).tokens == expected


def test_states_of_rejected_drafts_are_undone_without_another_forward() -> None:
    model, prompt = target("qwen3_5"), prompt_with("qwen3_5", ONE)
    expected = text(model, prompt, GREEDY)
    draft = TurningDrafter(prompt.tokens + expected, VOCAB)
    made = generator(model, draft=draft, draft_length=4)
    result = made.generate(prompt, **options())
    assert result.tokens == expected
    assert result.stats.drafted > result.stats.accepted
    assert result.stats.reruns == 0


def test_an_error_of_the_tower_ends_one_stream_and_the_next_is_right() -> None:
    model = tiny("qwen3_vl")
    prompt = prompt_with("qwen3_vl", ONE)
    expected = text(model, prompt, GREEDY)
    made = generator(model)
    original = model.vlm.get_input_embeddings

    def failing(*args: Any, **more: Any) -> Any:
        raise RuntimeError("no memory")

    model.vlm.get_input_embeddings = failing
    stream = made.stream(prompt, **options())
    with pytest.raises(RuntimeError, match="no memory"):
        next(stream)
    assert stream.result.finish_reason == "error"
    assert stream.cached_tokens == prompt.tokens[: len(stream.cached_tokens)]
    model.vlm.get_input_embeddings = original
    assert made.generate(prompt, **options()).tokens == expected


@pytest.mark.parametrize(
    "name", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3", "smolvlm"]
)
def test_a_second_turn_resumes_the_first_behind_its_images(name: str) -> None:
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


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "pixtral"])
def test_another_image_shares_no_more_than_the_text_before_it(name: str) -> None:
    model = target(name)
    one, other = prompt_with(name, ONE), prompt_with(name, ONE, seed=5)
    assert one.tokens == other.tokens
    texts = [text(model, each, GREEDY) for each in (one, other)]
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
    results = made.generate_batch([asked(p) for p in prompts], **options())
    assert [r.tokens for r in results] == [text(model, p, GREEDY) for p in prompts]


def test_what_does_not_go_with_images_is_refused() -> None:
    model, prompt = target("qwen2_5_vl"), prompt_with("qwen2_5_vl", ONE)
    made = generator(model)
    caches = model.make_cache()
    with pytest.raises(InvalidRequestError, match="prompt_cache was passed"):
        made.stream(prompt, prompt_cache=caches)
    with pytest.raises(InvalidRequestError, match="prompt_cache was passed"):
        made.stream([1, 2], prompt_cache=caches)
    windows = generator(target("gemma3"))
    with pytest.raises(InvalidRequestError, match="not tried with quantized caches"):
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
    more = {"prompt_cache": caches, "cached_tokens": ids[:8]}
    assert made.generate(ids[8:], **options(), **more).tokens == expected

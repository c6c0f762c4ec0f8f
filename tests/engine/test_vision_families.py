"""Texts of every vision family equal mlx-vlm's, with every kind of draft."""

from typing import Any

import mlx.core as mx
import pytest

from mlx_speculation import LookupDraft
from mlx_speculation.caches import states
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import Lane
from mlx_speculation.models.vision import ImageForward, VisionTarget
from mlx_speculation.models.vision.families import SERVED
from support.covering import covering, others_slow
from support.drafters.scripted_drafter import TurningDrafter
from support.models.mlx_vlm_decoding import their_text
from support.models.tiny_vision import (
    FAMILIES,
    KINDS,
    OTHERS,
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
    most,
    options,
    plain_text,
    prompt_of,
    request_of,
    target,
    text,
    written,
)

pytestmark = WITHOUT_MLX_VLM


SIZES = {"none": NONE, "one": ONE, "two": TWO}
# One family for each form of positions.
IN_TURNS = (
    *("qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3"),
    *("gemma4", "llava", "smolvlm", "lfm2_vl"),
)


@pytest.mark.parametrize(
    ("name", "images"), covering(FAMILIES, SIZES, quick=(0, KINDS))
)
def test_text_is_that_of_mlx_vlm_under_every_draft(name: str, images: str) -> None:
    sizes = SIZES[images]
    if SERVED[name].one_image and sizes == TWO:
        with pytest.raises(InvalidRequestError, match="mlx-vlm reads only one"):
            text(target(name), prompt_of(name, sizes), GREEDY)
        return
    model, prompt = target(name), prompt_of(name, sizes)
    assert plain_text(name, sizes) == their_text(model, prompt, TOKENS)
    for sampling in (GREEDY, SAMPLED):
        expected = plain_text(name, sizes, sampling)
        turning = TurningDrafter(prompt.tokens + expected, written(name))
        made = generator(model, draft=turning, draft_length=3)
        result = made.generate(request_of(prompt), **options(sampling))
        assert result.tokens == expected
        assert name != "qwen3_5" or result.stats.reruns == 0
        assert {accepted for accepted, _ in turning.settled} >= {0, 1, 4}
        assert turning.empty
    got = text(model, prompt, GREEDY, draft=LookupDraft(), draft_length=3)
    assert got == plain_text(name, sizes)


@pytest.mark.parametrize("first", others_slow(range(0, len(OTHERS), 6), (0, 18, 36)))
def test_a_few_words_of_other_families_are_those_of_mlx_vlm(first: int) -> None:
    """The full grid of these families is slow; here each has one prompt and drafter."""
    for name in OTHERS[first : first + 6]:
        model, prompt = target(name), prompt_of(name, most(name))
        expected = their_text(model, prompt, 6)
        draft = TurningDrafter(prompt.tokens + expected, written(name))
        made = generator(model, draft=draft, draft_length=3)
        assert made.generate(prompt, **options(max_tokens=6)).tokens == expected, name


@pytest.mark.parametrize("name", others_slow(FAMILIES, IN_TURNS))
def test_requests_in_turns_write_what_each_does_alone(name: str) -> None:
    """mlx-vlm keeps the positions of the last request on the model."""
    prompts = [
        prompt_with(name, ONE),
        prompt_with(name, most(name), seed=1),
        prompt_with(name, NONE, text="A text without a picture, of some length."),
    ]
    read = [target(name).with_slots(each) for each in prompts]
    alone = [their_text(target(name), each, TOKENS) for each in read]
    shared = generator(target(name), draft="lookup", draft_length=2)
    assert (
        in_turns(*(shared.stream(request_of(p), **options()) for p in prompts)) == alone
    )


@pytest.mark.parametrize(
    "name", others_slow([n for n in SERVED if SERVED[n].mrope], IN_TURNS)
)
def test_positions_on_the_model_are_not_read(name: str) -> None:
    expected = [plain_text(name, sizes) for sizes in (ONE, NONE)]

    class Poisoned(VisionTarget):
        def forward(self, *args: Any, **more: Any) -> mx.array:
            self.language_model._rope_deltas = mx.array([[999]])
            self.language_model._position_ids = mx.full((3, 1, 999), 77)
            return super().forward(*args, **more)

    poisoned = Poisoned(tiny(name).vlm)
    prompts = [prompt_with(name, sizes) for sizes in (ONE, NONE)]
    assert [text(poisoned, each, GREEDY) for each in prompts] == expected


@pytest.mark.parametrize("name", grid())
def test_chunks_of_a_prompt_are_one_pass_and_rounds_leave_what_steps_leave(
    name: str,
) -> None:
    """A lane after rounds equals a lane after steps, also if some rounds failed."""
    model, prompt = target(name), prompt_of(name, most(name))
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
    for state in (states(steps.caches), states(rounds.caches)):
        mx.eval(state)
    assert steps.seen == rounds.seen

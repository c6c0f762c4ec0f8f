"""The check of equal texts accepts near-ties and refuses real differences."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache

from mlx_speculation import Sampling
from mlx_speculation.engine.equivalence import texts
from mlx_speculation.samplers import Chooser, Rows
from mlx_speculation.samplers.noise.gumbel import CHOICE, gumbel, stream_key
from support.identity import assert_same_up_to_ties
from support.models.tiny_models import build

PROMPT = [7, 200, 31, 64, 5]
PRECEDING = Rows(range(9))


def test_a_margin_within_the_difference_of_the_widths_is_a_near_tie() -> None:
    chooser = Chooser(Sampling(seed=0), 4)
    row = mx.array([[1.0, 3.0, 2.9999, 0.0]])
    assert texts.weigh(chooser, row, PRECEDING, (0, 1, 2), 1e-4).near_tie
    assert not texts.weigh(chooser, row, PRECEDING, (0, 1, 2), 1e-5).near_tie
    assert not texts.weigh(chooser, row, PRECEDING, (0, 1, 0), 1e-4).near_tie
    assert not texts.weigh(chooser, row, PRECEDING, (0, 1, None), 1e-4).near_tie


def test_neighbours_in_the_dtype_of_the_logits_are_a_near_tie() -> None:
    chooser = Chooser(Sampling(seed=0), 4)
    row = mx.array([[16.0, 20.0, 19.875, 19.5]])
    for dtype, near in ((mx.bfloat16, True), (mx.float16, False), (mx.float32, False)):
        typed = row.astype(dtype)
        assert texts.weigh(chooser, typed, PRECEDING, (0, 1, 2), 0).near_tie == near
        assert not texts.weigh(chooser, typed, PRECEDING, (0, 1, 3), 0).near_tie


def test_noise_and_temperature_count_when_sampling() -> None:
    sampling = Sampling(temperature=0.5, seed=3)
    noise = gumbel(stream_key(3, CHOICE), mx.array([9]), 4)
    # The noise cancels in the scores: 0, 2e-4, 0 and -18 are left.
    row = -noise * sampling.temperature + mx.array([[0.0, 1e-4, 0.0, -9.0]])
    chooser = Chooser(sampling, 4)
    tie = texts.weigh(chooser, row, PRECEDING, (0, 0, 1), 1e-4)
    assert tie.near_tie
    assert tie.margin == pytest.approx(2e-4, rel=0.02)
    assert not texts.weigh(chooser, row, Rows(range(8)), (0, 0, 1), 1e-4).near_tie
    assert not texts.weigh(chooser, row, PRECEDING, (0, 0, 3), 1e-4).near_tie


def test_a_token_at_the_border_of_top_p_is_a_near_tie() -> None:
    chooser = Chooser(Sampling(temperature=1.0, top_p=0.7, seed=0), 3)
    row = mx.log(mx.array([[0.70001, 0.2, 0.09999]]))
    assert texts.weigh(chooser, row, PRECEDING, (0, 0, 1), 1e-4).near_tie
    assert not texts.weigh(chooser, row, PRECEDING, (0, 0, 2), 1e-4).near_tie
    assert not texts.weigh(chooser, row, PRECEDING, (0, 0, 1), 1e-6).near_tie


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_5"])
def test_the_deciding_row_is_the_one_that_chose(name: str) -> None:
    model, prompt = build(name), [*range(40)]
    steps = generate_step(mx.array(prompt), model, max_tokens=12)
    text = [*prompt, *(int(token) for token, _ in steps)]
    for width in (1, 4):
        for first in range(1, width + 1):
            for end in (40, 41, 47):
                row = texts.deciding_row(
                    model, text[:end], 40, first=first, width=width
                )
                assert int(mx.argmax(row)) == text[end]


class RoundsByWidth(nn.Module):
    """Slightly prefers token 1 to 2, but token 2 to 1 in forwards of several tokens."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def make_cache(self) -> list[Any]:
        return [KVCache()]

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        width = ids.shape[1]
        cache[0].update_and_fetch(*[mx.zeros((1, 1, width, 1))] * 2)
        row = mx.array([0.0, 1.0, 0.99995 if width == 1 else 1.00005])
        return mx.broadcast_to(row, (1, width, 3))


def test_texts_that_part_at_a_near_tie_are_the_same() -> None:
    model, chooser = RoundsByWidth(), Chooser(Sampling(seed=0), 3)

    def compare(other: list[int], width: int) -> Any:
        return assert_same_up_to_ties(
            model, chooser, PROMPT, [1, 1, 1], other, width=width
        )

    tie = compare([1, 2, 0], 4)
    assert (tie.index, tie.expected, tie.got) == (1, 1, 2)
    assert tie.margin == pytest.approx(5e-5, rel=0.01)
    assert tie.difference == pytest.approx(1e-4, rel=0.01)
    with pytest.raises(AssertionError, match="margin"):
        compare([1, 0, 0], 4)
    with pytest.raises(AssertionError, match="margin"):
        compare([1, 2, 0], 1)


def test_a_real_difference_is_refused() -> None:
    model, chooser = build("llama"), Chooser(Sampling(seed=0), 256)
    steps = generate_step(mx.array(PROMPT), model, max_tokens=8)
    text = [int(token) for token, _ in steps]

    def compare(other: list[int]) -> Any:
        return assert_same_up_to_ties(model, chooser, PROMPT, text, other, width=3)

    assert compare(text) is None
    with pytest.raises(AssertionError, match=r"token 5 is .* margin"):
        compare([*text[:5], (text[5] + 1) % 256, *text[6:]])
    with pytest.raises(AssertionError, match="token 7 is None"):
        compare(text[:7])

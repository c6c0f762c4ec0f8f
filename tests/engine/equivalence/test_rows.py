"""Drafts verified at once and one by one: real differences are found, and no others."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation.engine.equivalence.rows import (
    compare_rows,
    logit_rows,
    verify_both_ways,
)
from mlx_speculation.errors import InvalidRequestError, NonFiniteLogitsError
from mlx_speculation.models import Lane
from support.caches.cache_twins import Held
from support.covering import covering, others_slow
from support.identity import plain_text
from support.models.tiny_models import TINY_MODELS, build
from support.models.wrong_wide_forward import WrongInWideForwards

PROMPT = [(37 * i * i + 11 * i) % 256 for i in range(20)]
TOKENS = 15


def both_ways(model: nn.Module, **options: Any) -> list[Any]:
    text = plain_text(model, PROMPT, TOKENS)
    given = {"draft_length": 3, "places": 3, "seed": 5} | options
    return list(verify_both_ways(model, PROMPT, text, **given))


# Full attention, sliding windows, experts, and three kinds of recurrent states.
QUICK = ["llama", "llama(sliding)", "gpt_oss", "qwen3_5", "mamba", "rwkv7"]


@pytest.mark.parametrize("name", others_slow(TINY_MODELS, QUICK))
def test_every_row_of_a_tiny_model_chooses_the_same_token(name: str) -> None:
    places = both_ways(build(name))
    assert [place.position for place in places] == [0, 6, 12]
    for place in places:
        assert [row.index for row in place.rows] == [0, 1, 2, 3]
        for row in place.rows:
            assert not row.differs or row.margin <= 2 * row.difference
        assert place.difference < 1e-3
        assert not TINY_MODELS[name].bitwise or place.difference == 0


@pytest.mark.parametrize(
    ("name", "row", "sliding"),
    [
        ("llama", 0, "slack"),
        ("llama", 2, "native"),
        ("gemma3_text", 3, "slack"),
        ("gemma3_text", 1, "native"),
        ("qwen3_5", 2, "slack"),
    ],
)
def test_a_wrong_row_of_a_wide_forward_is_found(
    name: str, row: int, sliding: str
) -> None:
    model = build(name)
    right = both_ways(model, sliding=sliding)
    wrong = both_ways(WrongInWideForwards(model, row, 4), sliding=sliding)
    for one, other in zip(right, wrong, strict=True):
        assert (one.draft, one.wrong) == (other.draft, other.wrong)
        assert [each.index for each in other.rows if each.differs] == [row]
        expected, damaged = one.rows[row], other.rows[row]
        assert damaged.one_by_one == expected.one_by_one
        assert damaged.margin == expected.margin
        assert damaged.difference > 0.99 * damaged.margin


def test_a_draft_continues_the_text_but_for_one_token() -> None:
    model = build("llama")
    text = plain_text(model, PROMPT, TOKENS)
    seen = set()
    options: dict[str, Any] = {"draft_length": 5, "places": 11}
    for seed in range(2):
        for place in verify_both_ways(model, PROMPT, text, seed=seed, **options):
            stop = place.position + 5
            expected = text[place.position : stop]
            differing = [
                index
                for index, (token, drafted) in enumerate(
                    zip(expected, place.draft, strict=True)
                )
                if token != drafted
            ]
            assert differing == [place.wrong]
            seen.add(place.wrong)
            # Row 0 chooses the next token of the text. Row 1 does so too, if the first
            # drafted token is right.
            assert place.rows[0].one_by_one == text[place.position]
            if place.wrong > 0:
                assert place.rows[1].one_by_one == text[place.position + 1]
    assert seen == {0, 1, 2, 3, 4}


def test_the_seed_decides_the_drafts() -> None:
    model = build("llama")
    drafts = [[place.draft for place in both_ways(model, seed=s)] for s in (1, 1, 2)]
    assert drafts[0] == drafts[1] != drafts[2]


@pytest.mark.parametrize(
    ("name", "width"),
    covering(["llama", "gpt_oss", "qwen3_5", "rwkv7"], [1, 2, 5]),
)
def test_rows_are_the_native_ones_and_the_caches_stay(name: str, width: int) -> None:
    model = build(name)
    caches = make_prompt_cache(model)
    lane = Lane(model, caches)
    lane.feed(PROMPT)
    before = Held(caches, values=True)
    native = make_prompt_cache(model)
    model(mx.array([PROMPT]), cache=native)
    tokens, expected = [5, 6, 7, 8, 9], []
    for start in range(0, 5, width):
        rows = model(mx.array([tokens[start : start + width]]), cache=native)[0]
        expected.append(np.array(rows))
    actual = logit_rows(lane, tokens, width)
    np.testing.assert_array_equal(actual, np.concatenate(expected))
    before.assert_unchanged("the caches of a comparison")


def test_what_is_compared_is_named_by_row() -> None:
    single = np.array([[0.0, 3.0, 2.5], [1.0, -np.inf, 0.75]], np.float32)
    wide = np.array([[0.0, 3.0, 2.75], [0.5, -np.inf, 0.75]], np.float32)
    first, second = compare_rows(wide, single)
    assert (first.at_once, first.one_by_one, first.differs) == (1, 1, False)
    assert (first.margin, first.difference) == (0.5, 0.25)
    assert (second.at_once, second.one_by_one, second.differs) == (2, 0, True)
    assert (second.margin, second.difference) == (0.25, 0.5)


@pytest.mark.parametrize("side", [0, 1])
def test_a_row_of_nan_is_refused(side: int) -> None:
    rows = [np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32)]
    rows[side][1, 2] = np.nan
    with pytest.raises(NonFiniteLogitsError, match=r"Row 1 .* 1 NaN in 3 logits"):
        compare_rows(*rows)


@pytest.mark.parametrize(
    "wrong", [{"draft_length": 0}, {"draft_length": TOKENS + 1}, {"places": 0}]
)
def test_a_comparison_without_room_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidRequestError, match="not be shorter than a draft"):
        both_ways(build("llama"), **wrong)


def test_places_that_fall_together_are_compared_once() -> None:
    positions = [place.position for place in both_ways(build("llama"), places=99)]
    assert positions == list(range(TOKENS - 3 + 1))

"""Compares mlx-lm's `stream_generate` with ours, called with the same keywords."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache

from mlx_speculation import stream_generate
from mlx_speculation.caches import leaves
from mlx_speculation.engine.equivalence import texts as identity
from mlx_speculation.models import Lane
from mlx_speculation.samplers import Chooser
from support.identity import GREEDY, ROUNDING, assert_same_up_to_ties


@dataclass(frozen=True, slots=True)
class Answer:
    """Contents of a stream of responses."""

    tokens: list[int]
    texts: list[str]
    reasons: list[str | None]
    prompt_tokens: set[int]
    counts: list[int]
    logprobs: list[Any]

    @classmethod
    def of(cls, responses: Iterable[Any], count: int | None = None) -> "Answer":
        """Read at most `count` responses, then close."""
        taken = list(islice(responses, count))
        if hasattr(responses, "close"):
            responses.close()
        return cls(
            [response.token for response in taken],
            [response.text for response in taken],
            [response.finish_reason for response in taken],
            {response.prompt_tokens for response in taken},
            [response.generation_tokens for response in taken],
            [np.array(response.logprobs) for response in taken],
        )


def both(
    model: nn.Module,
    tokenizer: Any,
    prompt: Any,
    *,
    count: int | None = None,
    ours: dict[str, Any],
    theirs: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Answer, Answer]:
    """Return mlx-lm's answer without a draft, and ours.

    `ours` are options for our function alone, `theirs` for mlx-lm's alone, `options`
    for both. Both streams are closed after `count` responses.
    """
    expected = Answer.of(
        mlx_lm.stream_generate(model, tokenizer, prompt, **options, **(theirs or {})),
        count,
    )
    got = Answer.of(stream_generate(model, tokenizer, prompt, **options, **ours), count)
    return expected, got


def assert_same_answer(
    model: nn.Module,
    prompt: list[int],
    expected: Answer,
    got: Answer,
    *,
    bitwise: bool,
    chooser: Chooser | None = None,
    make_lane: identity.MakeLane = Lane,
    rounding: float = ROUNDING,
) -> bool:
    """Assert that answers are equal up to a near-tie; return False at a near-tie."""
    chooser = chooser or Chooser(GREEDY, 256)
    assert expected.tokens == got.tokens or not bitwise, "not bit for bit"
    tie = assert_same_up_to_ties(
        model,
        chooser,
        prompt,
        expected.tokens,
        got.tokens,
        width=5,
        make_lane=make_lane,
    )
    if tie is not None:
        assert tie.difference < rounding, f"more than rounding: {tie}"
        return False
    assert got.texts == expected.texts
    assert got.reasons == expected.reasons
    assert got.prompt_tokens == expected.prompt_tokens
    assert got.counts == expected.counts
    for theirs, ours in zip(expected.logprobs, got.logprobs, strict=True):
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours, theirs, atol=2 * rounding, rtol=0)
    return True


def assert_same_caches(
    expected: list[Any], got: list[Any], *, bitwise: bool, rounding: float = ROUNDING
) -> None:
    pairs = zip(leaves(expected), leaves(got), strict=True)
    for (place, theirs), (_, ours) in pairs:
        assert type(theirs).__name__ == type(ours).__name__, place
        assert getattr(theirs, "offset", None) == getattr(ours, "offset", None), place
        for one, other in zip(_rows(theirs), _rows(ours), strict=True):
            if one is None or other is None:
                assert one is other
                continue
            count = min(one.shape[-2], other.shape[-2])
            one, other = one[..., -count:, :], other[..., -count:, :]
            if bitwise:
                np.testing.assert_array_equal(other, one)
            else:
                np.testing.assert_allclose(other, one, atol=rounding, rtol=rounding)


def _rows(cache: Any) -> list[Any]:
    """Return the content of a cache: rows in the order of the text, or states."""
    if hasattr(cache, "cache"):
        return [None if a is None else np.array(_as_rows(a)) for a in cache.cache]
    if cache.keys is None:
        return []
    if isinstance(cache, RotatingKVCache):
        ordered = (cache._temporal_order(part) for part in (cache.keys, cache.values))
        last = min(cache.offset, cache.max_size)
        return [np.array(part[..., -last:, :]) for part in ordered]
    keys, values = cache.keys_and_values()
    if isinstance(cache, QuantizedKVCache):
        form: Any = {"group_size": cache.group_size, "bits": cache.bits}
        return [np.array(mx.dequantize(*part, **form)) for part in (keys, values)]
    return [np.array(keys), np.array(values)]


def _as_rows(array: mx.array) -> mx.array:
    return array if array.ndim > 1 else array[:, None]

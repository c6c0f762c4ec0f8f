"""Distributions of target and draft for every prefix, random and adversarial."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from support.sampling.enumeration import Tables

Array = NDArray[np.float64]
Draws = np.random.Generator
Pair = tuple[Array, Array]


def normalized(weights: Array) -> Array:
    """Return distributions from weights, [..., vocab]; uniform if all weights are 0."""
    mass = weights.sum(-1, keepdims=True)
    kept = np.where(mass > 0, weights, 1.0)
    distributions: Array = kept / kept.sum(-1, keepdims=True)
    return distributions


def spread(draws: Draws, shape: tuple[int, ...]) -> Array:
    return normalized(draws.exponential(size=shape))


def peaked(draws: Draws, shape: tuple[int, ...]) -> Array:
    return normalized(draws.exponential(size=shape) ** 6)


def one_hot(draws: Draws, shape: tuple[int, ...]) -> Array:
    ids = draws.integers(shape[-1], size=shape[:-1])
    return np.eye(shape[-1])[ids]


def with_zeros(draws: Draws, shape: tuple[int, ...]) -> Array:
    return normalized(spread(draws, shape) * (draws.random(shape) < 0.6))


def halves(draws: Draws, shape: tuple[int, ...]) -> Array:
    """Return distributions of weights 0, 1 and 2, whose ratios are often 1 or 1/2."""
    return normalized(draws.integers(0, 3, size=shape).astype(np.float64))


def tiny_parts(draws: Draws, shape: tuple[int, ...]) -> Array:
    return normalized(np.power(10.0, -draws.integers(0, 14, size=shape)))


def _apart(draws: Draws, shape: tuple[int, ...]) -> Pair:
    """Disjoint supports: the draft is always rejected."""
    mine = draws.random(shape) < 0.5
    mine[..., 0], mine[..., -1] = True, False
    distribution = spread(draws, shape)
    return normalized(distribution * mine), normalized(distribution * ~mine)


def _equal(draws: Draws, shape: tuple[int, ...]) -> Pair:
    distribution = spread(draws, shape)
    return distribution, distribution


def _reversed(draws: Draws, shape: tuple[int, ...]) -> Pair:
    distribution = peaked(draws, shape)
    return distribution, np.flip(distribution, -1).copy()


def _nearly_equal(draws: Draws, shape: tuple[int, ...]) -> Pair:
    distribution = spread(draws, shape)
    return distribution, normalized(
        distribution * (1 + 1e-9 * draws.standard_normal(shape))
    )


def _narrow_target(draws: Draws, shape: tuple[int, ...]) -> Pair:
    distribution = spread(draws, shape)
    return normalized(
        np.where(distribution < distribution.max(-1, keepdims=True), 0, distribution)
    ), distribution


def _narrow_draft(draws: Draws, shape: tuple[int, ...]) -> Pair:
    target, draft = _narrow_target(draws, shape)
    return draft, target


def _mixed(draws: Draws, shape: tuple[int, ...]) -> Pair:
    pairs = [kind(draws, shape) for kind in KINDS.values() if kind is not _mixed]
    picked = draws.integers(len(pairs), size=shape[:-1])[..., None]
    target = np.select([picked == i for i in range(len(pairs))], [p for p, _ in pairs])
    draft = np.select([picked == i for i in range(len(pairs))], [q for _, q in pairs])
    return target, draft


def _both(
    first: Callable[[Draws, tuple[int, ...]], Array],
    second: Callable[[Draws, tuple[int, ...]], Array],
) -> Callable[[Draws, tuple[int, ...]], Pair]:
    return lambda draws, shape: (first(draws, shape), second(draws, shape))


KINDS: dict[str, Callable[[Draws, tuple[int, ...]], Pair]] = {
    "spread": _both(spread, spread),
    "peaked": _both(peaked, peaked),
    "sharp target": _both(peaked, spread),
    "sharp draft": _both(spread, peaked),
    "zeros": _both(with_zeros, with_zeros),
    "one-hot target": _both(one_hot, spread),
    "one-hot draft": _both(spread, one_hot),
    "one-hot both": _both(one_hot, one_hot),
    "halves": _both(halves, halves),
    "tiny parts": _both(tiny_parts, tiny_parts),
    "apart": _apart,
    "equal": _equal,
    "reversed": _reversed,
    "nearly equal": _nearly_equal,
    "narrow target": _narrow_target,
    "narrow draft": _narrow_draft,
    "mixed": _mixed,
}


def tables(
    vocab: int, k: int, seed: int, kinds: list[str] | None = None, each: int = 1
) -> Tables:
    """Draw `each` pairs for every name in `kinds`.

    By default "mixed" is named three times, and every other kind once.
    """
    draws = np.random.default_rng([vocab, k, seed])
    names = kinds or [*KINDS, "mixed", "mixed"]
    target: list[Array] = []
    draft: list[Array] = []
    for depth in range(k + 1):
        shape = (each, vocab**depth, vocab)
        distributions = [KINDS[name](draws, shape) for name in names]
        target.append(np.concatenate([p for p, _ in distributions]))
        draft.append(np.concatenate([q for _, q in distributions]))
    return Tables(target, draft[:-1])

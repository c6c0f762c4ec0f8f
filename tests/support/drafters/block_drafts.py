"""Greedy drafts of a block drafter, outside of any stream."""

from typing import Any

import mlx.core as mx

from mlx_speculation.models import HiddenStates


class Greedy:
    """Chooses the column with the largest logit, and records its calls."""

    def __init__(self) -> None:
        self.seen: list[tuple[mx.array, mx.array | None]] = []  # logits [1, n], ids
        self.tokens: list[int] = []

    def __call__(self, logits: mx.array, ids: mx.array | None = None) -> mx.array:
        self.seen.append((logits, ids))
        best: Any = mx.argmax(logits[0]).item()
        token: Any = best if ids is None else ids[best].item()
        self.tokens.append(token)
        return mx.array([token], mx.uint32)


def context_of(drafter: Any, tokens: list[int]) -> mx.array:
    """Return the drafter's context: states of all tokens but the last."""
    model = drafter._target.parts.model
    taps = HiddenStates(model, layers=drafter.layers, after_norm=True)
    with taps.collect() as states:
        model(mx.array([tokens[:-1]]))
    result: mx.array = drafter.states(states)
    return result


def drafted(drafter: Any, tokens: list[int], count: int) -> Greedy:
    choose, newest = Greedy(), mx.array([tokens[-1:]])
    context = context_of(drafter, tokens)
    drafter.draft(context, newest, drafter.head.new_caches(), count, choose)
    return choose

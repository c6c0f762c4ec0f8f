"""Steady-state times of forwards.

A steady forward is fed the choice of the previous one and is submitted before that
result is read, as in a long run of plain steps. After it the caches are rolled back, so
that the context keeps its length. Recurrent states are rolled back only after forwards
of several tokens. On a model with a round's hooks, a forward of w rows takes the time
of verifying w rows; it includes no sampler, no commit and no waiting for the host.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from bench.turns import Clock
from mlx_speculation.caches import (
    Speculation,
    leaves,
    states,
    with_slack,
)
from mlx_speculation.models import HiddenStates
from mlx_speculation.models.mtp import Mtp
from mlx_speculation.models.round_context import rows_of_a_round

PREFILL = 2048
WARM_UP = 2  # forwards that are not counted

# A forward of tokens [1, w], which returns the next ones, [1, w]
Step = Callable[[mx.array], mx.array]


def filled(model: nn.Module, tokens: Sequence[int]) -> list[Any]:
    """Return caches that hold these tokens, of the kinds that a generator makes.

    The tokens are read with a round's implementations of layers. On x86-64 this takes a
    third of the time.
    """
    caches: list[Any] = with_slack(make_prompt_cache(model))
    for start in range(0, len(tokens), PREFILL):
        chunk = list(tokens[start : start + PREFILL])
        with rows_of_a_round():
            model(mx.array([chunk]), cache=caches)
        mx.eval(states(caches))
    return caches


def step_of(model: nn.Module, caches: list[Any], *, drafts: bool = False) -> Step:
    """Return a forward over these caches; the model has a round's hooks already.

    `drafts`: the model drafts, and its forwards of one token run like a round's.
    """
    rows = [leaf for _, leaf in leaves(caches) if hasattr(leaf, "trim")]

    def step(tokens: mx.array) -> mx.array:
        logits: mx.array
        if tokens.shape[1] > 1:
            ways = rows_of_a_round()
            with Speculation(caches) as speculation, ways:
                logits = model(tokens, cache=speculation.caches)
        else:
            with rows_of_a_round() if drafts else nullcontext():
                logits = model(tokens, cache=caches)
            for leaf in rows:
                leaf.trim(1)
        return mx.broadcast_to(mx.argmax(logits[:, -1:], axis=-1), tokens.shape)

    return step


def head_step_of(mtp: Mtp, model: nn.Module, context: int) -> Step:
    """Return a step of an MTP head with one layer, after `context` positions."""
    caches = with_slack(mtp.head.new_caches()[0])
    hidden = HiddenStates(model, after_norm=True).embed(
        mx.zeros((1, max(1, context)), mx.int32)
    )
    mtp.history(hidden, mx.zeros(hidden.shape[:2], mx.int32), caches)
    mx.eval(states(caches))
    state = hidden[:, -1:]

    def step(tokens: mx.array) -> mx.array:
        nonlocal state
        out = mtp.step(state, tokens, caches)
        state = out.recycled
        for leaf in caches:
            leaf.trim(1)
        return mx.argmax(out.logits, axis=-1)

    return step


def steady_seconds(step: Step, width: int, count: int, clock: Clock) -> float:
    """Return the mean seconds of `count` forwards, of which one is always in flight."""
    tokens = mx.full((1, width), 5, mx.uint32)
    mx.synchronize()
    started = 0.0
    for index in range(count + WARM_UP):
        chosen = step(tokens)
        mx.async_eval(chosen)
        mx.eval(tokens)
        tokens = chosen
        if index + 1 == WARM_UP:
            started = clock()
    # A forward is in flight at both readings of the clock.
    finished = clock()
    mx.eval(tokens)
    return (finished - started) / count

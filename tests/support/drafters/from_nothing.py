"""Drafts of each kind of drafter, computed from the committed tokens alone."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.engine import DFlashDraft, EagleDraft, MtpDraft, PEagleDraft
from mlx_speculation.engine.drafters.base import Choose
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.models import HiddenStates

# Returns drafted tokens that follow the sequence, as many as the integer says.
FromNothing = Callable[[Sequence, int, Choose], list[int]]


def _token(chosen: Any) -> int:
    token: int = chosen.tokens.item()
    return token


def _ahead(tokens: list[int]) -> mx.array | None:
    return mx.array(tokens, mx.uint32) if tokens else None


def of_model(model: nn.Module) -> FromNothing:

    def chain(sequence: Sequence, count: int, choose: Choose) -> list[int]:
        drafted: list[int] = []
        for _ in range(count):
            logits = model(mx.array([[*sequence.tokens, *drafted]]))[:, -1]
            rows = sequence.rows(_ahead(drafted))
            drafted.append(_token(choose(logits.astype(mx.float32), rows)))
        return drafted

    return chain


def of_mtp(draft: MtpDraft) -> FromNothing:
    mtp, head = draft.mtp, draft.mtp.head
    before = head.convention.hidden == "before_norm"
    taps = HiddenStates(draft.model, before_norm=before, after_norm=not before)

    def chain(sequence: Sequence, count: int, choose: Choose) -> list[int]:
        tokens = sequence.tokens
        with taps.collect() as states:
            draft.model(mx.array([tokens[:-1]]))
        hidden = states.before_norm if before else states.after_norm
        caches, fed = head.new_caches(), list(tokens[1:])
        known = len(fed)
        for k in range(count):
            layer = k if head.chained else 0
            if layer or k == 0:
                read = mx.array([fed[layer : layer + known]])
                out = mtp.rows(hidden, read, caches[layer], layer)
            else:
                out = mtp.rows(hidden[:, -1:], mx.array([fed[-1:]]), caches[0])
            hidden = out.recycled
            rows = sequence.rows(_ahead(fed[known:]))
            fed.append(_token(choose(out.logits[:, -1], rows)))
        return fed[known:]

    return chain


def of_eagle(draft: EagleDraft) -> FromNothing:
    eagle = draft.eagle
    taps = draft.taps

    def chain(sequence: Sequence, count: int, choose: Choose) -> list[int]:
        tokens = sequence.tokens
        with taps.collect() as states:
            draft.model(mx.array([tokens[:-1]]))
        caches, fed = eagle.head.new_caches()[0], list(tokens[1:])
        known = len(fed)
        out = eagle.rows(eagle.states(states), mx.array([fed]), caches)
        for k in range(count):
            if k:
                out = eagle.rows(out.recycled[:, -1:], mx.array([fed[-1:]]), caches)
            rows = sequence.rows(_ahead(fed[known:]))
            fed.append(_token(choose(out.logits[:, -1], rows, eagle.head.ids)))
        return fed[known:]

    return chain


def of_peagle(draft: PEagleDraft) -> FromNothing:
    """Return a function that drafts with one forward of a P-EAGLE head per token."""
    eagle, taps = draft.eagle, draft.taps

    def one_by_one(sequence: Sequence, count: int, choose: Choose) -> list[int]:
        tokens = sequence.tokens
        with taps.collect() as states:
            draft.model(mx.array([tokens[:-1]]))
        known, drafted = mx.array([tokens[1:]], mx.uint32), list[int]()
        for k in range(count):
            hidden, masks = eagle.head.masked(1, k)
            hidden = mx.concatenate([eagle.states(states), hidden], axis=1)
            read = mx.concatenate([known, masks], axis=1)
            out = eagle.rows(hidden, read, eagle.new_caches())
            rows = sequence.rows(_ahead(drafted))
            drafted.append(_token(choose(out.logits[:, -1], rows, eagle.head.ids)))
        return drafted

    return one_by_one


def of_block(draft: DFlashDraft) -> FromNothing:
    dflash = draft.dflash
    taps = HiddenStates(draft.model, layers=dflash.layers, after_norm=True)

    def block(sequence: Sequence, count: int, choose: Choose) -> list[int]:
        tokens = sequence.tokens
        with taps.collect() as states:
            draft.model(mx.array([tokens[:-1]]))
        context, newest = dflash.states(states), mx.array([tokens[-1:]])
        drafted: list[int] = []

        def choose_next(logits: mx.array, ids: mx.array | None = None) -> mx.array:
            rows = sequence.rows(_ahead(drafted))
            columns = dflash.head.ids if ids is None else ids
            drafted.append(_token(choose(logits, rows, columns)))
            return mx.array(drafted[-1:], mx.uint32)

        dflash.draft(context, newest, dflash.head.new_caches(), count, choose_next)
        return drafted

    return block

"""An assistant that knows the text, and checks its inputs."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from mlx_speculation.engine import AssistantDraft
from mlx_speculation.models import HiddenStates
from mlx_speculation.models.gemma_assistant import AssistantOutput, Read
from support.models.assistant_checkpoints import DIM, SLIDING, VOCAB, WINDOW

_OWN = 1000.0  # the oracle's state after step j is _OWN + j


class OracleStep:
    """Predicts the next token of a known text, in place of `Assistant.step`.

    Every call is checked. The first call of a round gets the target's state before the
    newest token; later calls get the oracle's state. Each call reads the target's keys
    and values of all positions before the newest token; in sliding layers, of the last
    `WINDOW` of these positions.

    Args:
        wrong: returns whether the token at a position is predicted wrong.
        sparse: whether the oracle returns logits for a few ids only.
        gone: number of rows of a window that a step in flight may have replaced.
    """

    def __init__(
        self,
        draft: AssistantDraft,
        text: list[int],
        *,
        wrong: Callable[[int], bool] = lambda position: False,
        sparse: bool = False,
        gone: int = 0,
    ) -> None:
        self._draft, self._text, self._wrong = draft, text, wrong
        self._sparse, self._gone = sparse, gone
        self._after = draft.anchor == "token"
        taps = HiddenStates(draft.model, after_norm=True)
        caches = whole_caches(draft.model)
        with taps.collect() as states:
            draft.model(mx.array([text]), cache=caches)
        self._states = states.after_norm
        self._kept = {
            kind: caches[place].keys_and_values()
            for kind, place in draft.shared.places.items()
        }
        self.calls: list[tuple[int, int]] = []  # (position of the token, step)

    def __call__(
        self, embedded: mx.array, state: mx.array, read: Read, position: int
    ) -> AssistantOutput:
        newest = position if self._after else position + 1
        step = 0
        number: Any = state[0, 0, 0].item()
        if bool((state == number).all()) and number >= _OWN:
            step = round(number - _OWN)
            assert self.calls[-1] == (newest, step - 1)
        else:
            assert mx.allclose(state[0, 0], self._states[0, newest - 1], atol=1e-3)
        self.calls.append((newest, step))
        self._check_read(read, newest)
        place = newest + step
        if place < len(self._text) and not any(
            self._wrong(p) for p in range(newest + 1, place + 1)
        ):
            table: Any = self._draft.model
            token = mx.array(self._text[place : place + 1])
            scaled = table.model.embed_tokens(token[None]) * DIM**0.5
            assert mx.allclose(embedded, scaled, atol=1e-6), place
        next_state = mx.full((1, 1, DIM), _OWN + step + 1)
        guess = self._guess(place + 1)
        if self._sparse:
            ids = mx.array([(guess + 7 * i) % VOCAB for i in (3, 0, 5)], mx.uint32)
            return AssistantOutput(
                next_state, mx.array([[-100.0, 100.0, -100.0]]), ids[None]
            )
        logits = mx.where(mx.arange(VOCAB) == guess, 100.0, -100.0)
        return AssistantOutput(next_state, logits[None], None)

    def _guess(self, place: int) -> int:
        if place >= len(self._text):
            return 0
        return (self._text[place] + self._wrong(place)) % VOCAB

    def _check_read(self, read: Read, stop: int) -> None:
        for kind, pair in read.items():
            start = max(0, stop - WINDOW) if kind == SLIDING else 0
            for read_rows, whole in zip(pair[:2], self._kept[kind], strict=True):
                wanted = whole[:, :, start:stop]
                lacking = wanted.shape[2] - read_rows.shape[2]
                assert lacking in (0, self._gone if start else 0), (kind, stop)
                wanted = wanted[:, :, lacking:]
                assert mx.allclose(in_order(read_rows), in_order(wanted), atol=1e-3)


def whole_caches(model: nn.Module) -> list[Any]:
    """Return caches of a model that keep all rows, also in sliding layers."""
    return [KVCache() for _ in model.make_cache()]


def in_order(rows: mx.array) -> mx.array:
    """Return rows [1, heads, n, dim], sorted by their content."""
    order = mx.argsort(rows[0, 0, :, 0])
    return rows[:, :, order]

"""Heads that know the text, and check their inputs."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from mlx_speculation.models import HiddenStates
from mlx_speculation.models.checkpoints import HeadOnTarget, HeadOutput

VOCAB, DIM = 256, 64
# The oracle's states are this plus a different number for each slot and layer.
_OWN = 1000.0


class OracleHead:
    """The attributes of a head that its callers read; several layers form a chain."""

    def __init__(self, layers: int, depth: int | None) -> None:
        self.chained = layers > 1
        self.depth = layers if self.chained else depth
        self._layers = layers

    def new_caches(self) -> list[list[Any]]:
        return [[KVCache()] for _ in range(self._layers)]


class OracleMtp:
    """A head that predicts the tokens of a known text.

    Every call is checked. Slot i of layer 0 must have the target's state at position i
    (before the norm if `before_norm`), or the oracle's state of the slot before. With
    the target's state, it must have token i + 1 of the text. Caches hold the tokens.
    `first` is the first slot of new caches; `wrong` says where the prediction is wrong.
    """

    def __init__(
        self,
        target: nn.Module,
        text: list[int],
        *,
        before_norm: bool = False,
        layers: int = 1,
        depth: int | None = None,
        wrong: Callable[[int], bool] = lambda position: False,
        first: int = 0,
    ) -> None:
        self.head = OracleHead(layers, depth)
        self._text, self._wrong, self._first = text, wrong, first
        taps = HiddenStates(target, before_norm=before_norm, after_norm=not before_norm)
        with taps.collect() as states:
            target(mx.array([text]))
        self._states = states.before_norm if before_norm else states.after_norm
        self.calls: list[tuple[str, int, int, int]] = []
        self.chained_steps = 0

    def rows(
        self, hidden: mx.array, tokens: mx.array, caches: Sequence[Any], layer: int = 0
    ) -> HeadOutput:
        """Write all slots, and return the outputs of all."""
        start = self._checked("rows", hidden, tokens, caches, layer)
        return self._said(range(start, start + tokens.shape[1]), layer)

    draft = HeadOnTarget.draft

    def step(
        self, hidden: mx.array, tokens: mx.array, caches: Sequence[Any], layer: int = 0
    ) -> HeadOutput:
        """Write all slots, and return the output of the last."""
        start = self._checked("step", hidden, tokens, caches, layer)
        stop = start + tokens.shape[1]
        return self._said(range(stop - 1, stop), layer)

    def history(
        self, hidden: mx.array, tokens: mx.array, caches: Sequence[Any], layer: int = 0
    ) -> None:
        self._checked("history", hidden, tokens, caches, layer)

    def _checked(
        self,
        method: str,
        hidden: mx.array,
        tokens: mx.array,
        caches: Sequence[Any],
        layer: int,
    ) -> int:
        """Check the slots, write their tokens, and return the first slot."""
        (cache,) = caches
        start, count = cache.offset + self._first, tokens.shape[1]
        assert hidden.shape == (1, count, DIM)
        self.calls.append((method, layer, start, count))
        for i in range(count):
            slot, state = start + i, hidden[0, i]
            if layer == 0 and not self._is_own(state):
                assert mx.allclose(state, self._states[0, slot], atol=1e-3), slot
                assert tokens[0, i].item() == self._text[slot + 1], slot
            else:
                self.chained_steps += 1
                expected = (slot, layer - 1) if layer else (slot - 1, 0)
                assert state[0].item() == _number(*expected), (slot, layer)
        row = tokens[:, None, :, None].astype(mx.float32)
        cache.update_and_fetch(row, row)
        return int(start)

    def _is_own(self, state: mx.array) -> bool:
        return bool((state == state[0]).all()) and bool(state[0] >= _OWN)

    def _said(self, slots: range, layer: int) -> HeadOutput:
        values = mx.array([_number(slot, layer) for slot in slots])
        recycled = mx.broadcast_to(values[None, :, None], (1, len(slots), DIM))
        ids = [self._guess(slot + 2 + layer) for slot in slots]
        logits = mx.where(mx.arange(VOCAB) == mx.array(ids)[:, None], 100.0, -100.0)
        return HeadOutput(recycled, logits[None])

    def _guess(self, position: int) -> int:
        if position >= len(self._text):
            return 0
        return (self._text[position] + self._wrong(position)) % VOCAB


def _number(slot: int, layer: int) -> float:
    return _OWN + 4 * slot + layer


def held_tokens(caches: list[Any]) -> list[int]:
    """Return the tokens in the caches of one layer of an oracle."""
    keys, _ = caches[0].keys_and_values()
    return [int(token) for token in keys[0, 0, :, 0].tolist()]

"""A block drafter that knows the text and checks its inputs."""

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.engine import DFlashDraft
from mlx_speculation.engine.drafters.registry import draft_folder
from mlx_speculation.models import HiddenStates
from support.models.block_checkpoints import write_block
from support.models.dflash_checkpoints import DIM, VARIANTS, VOCAB, write_dflash


def load_block(name: str, model: nn.Module, layers: tuple[int, ...]) -> DFlashDraft:
    """Load a drafter with random weights that reads these layers of the target."""
    write = write_dflash if name in VARIANTS else write_block
    with TemporaryDirectory() as made:
        folder, source = draft_folder(write(Path(made), name, layers))
        assert issubclass(source, DFlashDraft)
        return source.from_folder(folder, model)


class BlockOracle:
    """Replaces the layers of a drafter, and predicts the tokens of a known text.

    A row of the caches holds the position of a context row, or -1 for a row of a block.
    `wrong` returns whether the token at a position is predicted wrong.
    """

    def __init__(
        self,
        draft: DFlashDraft,
        text: list[int],
        wrong: Callable[[int], bool] = lambda position: False,
    ) -> None:
        drafter: Any = draft.dflash
        self._text, self._wrong = text, wrong
        self._rows = drafter.head.settings.block
        taps = HiddenStates(draft.model, layers=drafter.layers, after_norm=True)
        with taps.collect() as collected:
            draft.model(mx.array([text]))
        self._context = drafter.states(collected)
        self.fed = 0  # context positions written by `history`
        drafter.history = self.history
        drafter.rows = self.rows
        drafter._logits = self.logits

    def history(
        self, context: mx.array, tokens: mx.array, caches: Sequence[Any]
    ) -> None:
        self.fed += self._write(context, caches)

    def rows(
        self, context: mx.array, token: mx.array, caches: Sequence[Any], count: int
    ) -> mx.array:
        """Write context and a block, and return states that encode the next ids."""
        self._write(context, caches)
        newest = caches[0].offset
        assert token.tolist() == [[self._text[newest]]]
        rows = mx.full((1, 1, self._rows, 1), -1.0)
        for cache in caches:
            cache.update_and_fetch(rows, rows)
        ids = [self._guess(newest + j) for j in range(1, 1 + count)]
        state = mx.array(ids, mx.float32)[None, :, None]
        return mx.broadcast_to(state, (1, count, DIM))

    def logits(self, states: mx.array) -> mx.array:
        """Return logits with all weight on the encoded ids."""
        ids = states[..., :1].astype(mx.int32)
        return mx.where(mx.arange(VOCAB) == ids, 1e5, -1e5)

    def _write(self, context: mx.array, caches: Sequence[Any]) -> int:
        start, count = caches[0].offset, context.shape[1]
        assert context.shape == (1, count, DIM)
        expected = self._context[:, start : start + count]
        assert mx.allclose(context, expected, atol=1e-3)
        rows = mx.arange(start, start + count).astype(mx.float32)[None, None, :, None]
        for cache in caches:
            cache.update_and_fetch(rows, rows)
        return count

    def _guess(self, position: int) -> int:
        if position >= len(self._text):
            return 0
        return (self._text[position] + self._wrong(position)) % VOCAB

"""Journal of `BatchKVCache`, where all rows end at one column, `_idx`.

    opened at _idx 5, the model writes 3 positions  columns [0, 8) of every row
    commit(1) or commit([1, 1])                     _idx 6, nothing is copied
    commit([3, 1])                                  _idx 8: row 1 moves right by 2 and
                                                    gets 2 more columns of left padding
    rollback()                                      _idx 5, nothing is copied

If rows keep different numbers of positions, the commit copies the buffers once, and
drops left padding that all rows share. To find it, the host reads `left_padding`; it
does not wait, since the round's forward has already computed that array.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache

from mlx_speculation.caches.journal import Keep
from mlx_speculation.caches.journals.kv import even_out
from mlx_speculation.caches.journals.live import LiveJournal
from mlx_speculation.errors import InvalidRequestError


def shared_padding(padding: mx.array, keep: Sequence[int]) -> int:
    """Return how many positions of left padding all rows share after a commit."""
    longest = max(keep)
    before: Any = padding.tolist()
    # Rows that keep fewer positions move right, and get more padding.
    shared = min(p + longest - k for p, k in zip(before, keep, strict=True))
    return max(0, int(shared))


def moved(x: mx.array, right: mx.array, width: int) -> mx.array:
    """Return the first `width` positions of `x` after its rows have moved right.

    `x` is [batch, heads, positions, dim]. `right` is int [batch]: how many positions
    each row moves; below 0: to the left. The columns to the left of a moved row repeat
    its first position; a cyclic shift would put rejected positions there. Positions
    moved out at either end are lost.
    """
    source = mx.arange(width, dtype=right.dtype)[None] - right[:, None]
    source = mx.clip(source, 0, x.shape[2] - 1)  # [batch, width]
    return mx.take_along_axis(x, source[:, None, :, None], axis=2)


def check_no_right_padding(cache: Any, pending: mx.array | None) -> None:
    """Refuse to keep a part of a prompt that still has right padding."""
    if pending is not None:
        raise InvalidRequestError(
            f"A {type(cache).__name__} cannot keep a part of the written positions "
            f"while its {pending.shape[0]} rows are padded on the right. Keep all or "
            "nothing, and call finalize() before drafting."
        )


class BatchKVJournal(LiveJournal):
    """Journal of one `BatchKVCache`; the model sees the live cache itself."""

    def __init__(self, cache: BatchKVCache, whole: bool = False) -> None:
        self.presented: Any = cache
        self._cache: Any = cache
        self._start = self._cache._idx
        self._offset = self._cache.offset
        self._padding = self._cache.left_padding
        self._was_empty = self._cache.keys is None
        self._replaced: tuple[mx.array, mx.array] | None = None

    @property
    def rows(self) -> int:
        """Number of sequences in the batch."""
        return int(self._offset.shape[0])

    @property
    def written(self) -> int:
        """Positions appended to every row since the journal was opened."""
        return int(self._cache._idx - self._start)

    def prepare(self, keep: Keep) -> None:
        """Refuse to keep a part of a prompt that is padded on the right."""
        if keep != self.written and self.written:
            check_no_right_padding(self._cache, self._cache._right_padding)

    def commit(self, keep: Keep) -> None:
        """Let all rows end where the row that keeps the most positions ends."""
        if not self.written:
            return
        if isinstance(keep, int):
            self._cache._idx = self._start + keep
            self._cache.offset = self._offset + keep
        else:
            self._commit_rows(keep)

    def _commit_rows(self, keep: Sequence[int]) -> None:
        cache, longest = self._cache, max(keep)
        spare = min(shared_padding(self._padding, keep), self._start + longest)
        kept = mx.array(list(keep), dtype=self._offset.dtype)
        right = longest - spare - kept
        self._replaced = cache.keys, cache.values
        capacity = cache.keys.shape[2]
        cache.keys = moved(cache.keys, right, capacity)
        cache.values = moved(cache.values, right, capacity)
        cache._idx = self._start + longest - spare
        cache.offset = self._offset + kept
        cache.left_padding = self._padding + right
        # Evaluating the keys evaluates these two, even if no mask is made of them.
        cache.keys = mx.depends(cache.keys, (cache.left_padding, cache.offset))

    def rollback(self) -> None:
        """Move the end back; empty the cache again if it was empty."""
        cache = self._cache
        if self._replaced is not None:
            cache.keys, cache.values = self._replaced
        cache._idx, cache.offset = self._start, self._offset
        cache.left_padding = self._padding
        if self._was_empty:
            cache.keys = cache.values = None
        elif cache.keys is not None:
            even_out(cache)

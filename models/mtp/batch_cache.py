"""The KV cache of a head for the rows of a batch; those of one are like `MtpCache`.

Rows have different numbers of positions to be written: those of committed text since
the last round. They are fed together, shorter rows padded on the right, and each keeps
its own; nobody reads what comes out of them. Then all rows draft from their last
position on, one position a forward, and of these only the first one is of committed
text:

    to be written    5 6 7                  row 0       4        row 1, keys and values
    fed              5 6                    .
    kept             5 6
    drafted from     7 d1 d2                4 d1 d2
    kept             7                      4

A head that makes all drafts in one forward (`ParallelCache`) writes them behind 7 and 4
at once, and they go as well. Padding is never attended to: it stands behind the
positions of its forward, and is gone when the next one is written. So no row waits for
another, and none is fed twice.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlx_speculation.caches import Speculation, array_bytes, merged, states
from mlx_speculation.models.checkpoints.draft_head import ChooseNext
from mlx_speculation.models.checkpoints.parallel_cache import ParallelCache
from mlx_speculation.models.mtp.cache import MtpCache

RowCache = MtpCache | ParallelCache


class BatchHeadCache:
    """The caches of a head for several rows, none of a chain of layers.

    Args:
        kind: of a row's caches: `MtpCache` or `ParallelCache`.
        mtp: the head on its target.

    Attributes:
        ends: for each row, the position that comes next.
        firsts: for each row, the first position that is held.
    """

    def __init__(self, kind: Callable[..., RowCache], mtp: Any) -> None:
        self.kind, self.mtp = kind, mtp
        self.caches: list[Any] = []
        self.ends: list[int] = []
        self.firsts: list[int] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the caches, as allocated."""
        return array_bytes(self.caches)

    def join(self, each: Sequence[RowCache]) -> None:
        """Let rows join behind those that are there; what they hold is copied.

        If it fails, the cache is as before.
        """
        joining = merged([cache.caches for cache in each])
        if self.ends:
            for cache, other in zip(self.caches, joining, strict=True):
                cache.extend(other)
        else:
            self.caches = joining
        self.ends = self.ends + [cache.end for cache in each]
        self.firsts = self.firsts + [cache.first for cache in each]

    def leave(self, stay: Sequence[int]) -> None:
        """Keep these rows, in this order, and let go of the others."""
        if stay:
            indices = mx.array(list(stay))
            mx.eval(indices)  # caches read it, each in its turn
            for cache in self.caches:
                cache.filter(indices)
        else:
            self.caches = []
        self.ends = [self.ends[row] for row in stay]
        self.firsts = [self.firsts[row] for row in stay]

    def extract(self, row: int) -> RowCache:
        """Return a copy of what one row holds, as it would be held alone."""
        alone = self.kind(self.mtp, self.firsts[row])
        alone.take([cache.extract(row) for cache in self.caches], self.ends[row])
        return alone

    def begin(self) -> "BatchHeadRound":
        """Open a round."""
        return BatchHeadRound(self)


class BatchHeadRound:
    """Writes to the caches of all rows, which can be undone until others are made."""

    def __init__(self, cache: BatchHeadCache) -> None:
        self._cache = cache
        self._before = cache.ends
        self._speculations: list[Speculation] = []
        self._drafting: Speculation | None = None

    def feed(self, hidden: mx.array, tokens: mx.array, keep: Sequence[int]) -> None:
        """Write positions of committed text, `keep[i]` of row i, and keep them.

        Args:
            hidden: the target's states there, [rows, n, dim].
            tokens: ids that they are paired with, [rows, n].
            keep: up to n, and not all of them 0.
        """
        speculation = self._open()
        self._cache.mtp.history(hidden, tokens, speculation.caches)
        self._keep(speculation, keep)

    def draft(
        self, hidden: mx.array, tokens: mx.array, count: int, choose: ChooseNext
    ) -> None:
        """Write one position of every row, and draft behind it; see `ParallelHead`.

        Args:
            hidden: the target's states, [rows, 1, dim].
            tokens: ids that they are paired with, [rows, 1].
            count: how many drafts.
            choose: gets logits [rows, n] of the next ones, and returns them, [rows].
        """
        self._drafting = self._open()
        self._cache.mtp.draft(hidden, tokens, self._drafting.caches, count, choose)

    def commit(self, keep: Sequence[int]) -> None:
        """Keep so many positions of each row's drafting."""
        if self._drafting is not None:
            self._keep(self._drafting, keep)

    def evaluate(self) -> None:
        """Wait for what was written."""
        mx.eval(states(self._cache.caches))

    def rollback(self) -> None:
        """Undo all of it. Never raises."""
        for speculation in reversed(self._speculations):
            speculation.rollback()
        self._cache.ends = self._before

    def _open(self) -> Speculation:
        speculation = Speculation(self._cache.caches)
        self._speculations.append(speculation)
        return speculation

    def _keep(self, speculation: Speculation, keep: Sequence[int]) -> None:
        even = len(set(keep)) == 1
        speculation.commit(keep[0] if even else list(keep))
        ends = self._cache.ends
        self._cache.ends = [end + count for end, count in zip(ends, keep, strict=True)]

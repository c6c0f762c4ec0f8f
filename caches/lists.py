"""Journal of `CacheList`: the journals of its members."""

from collections.abc import Sequence

from mlx_lm.models.cache import CacheList

from mlx_speculation.caches.journal import Journal


class ListJournal:
    """Journal of one `CacheList`; its members move in step."""

    def __init__(self, journals: Sequence[Journal]) -> None:
        self._journals = tuple(journals)
        self._presented = CacheList(*(journal.presented for journal in self._journals))

    @property
    def presented(self) -> CacheList:
        """A list of what the members present."""
        return self._presented

    @property
    def members(self) -> tuple[Journal, ...]:
        """The members' journals."""
        return self._journals

    @property
    def written(self) -> int | None:
        """Positions written by the members; None when no member knows."""
        known = [j.written for j in self._journals if j.written is not None]
        return max(known) if known else None

    def can_keep(self, keep: int) -> bool:
        """Whether every member can keep the prefix."""
        return all(journal.can_keep(keep) for journal in self._journals)

    def prepare(self, keep: int) -> None:
        """Prepare every member."""
        for journal in self._journals:
            journal.prepare(keep)

    def commit(self, keep: int) -> None:
        """Commit every member."""
        for journal in self._journals:
            journal.commit(keep)

    def rollback(self) -> None:
        """Roll every member back."""
        for journal in self._journals:
            journal.rollback()

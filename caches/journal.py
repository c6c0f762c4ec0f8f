"""The protocol of a journal: the undo log of one cache during a speculation."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

Keep = int | Sequence[int]  # one number for all rows of the batch, or one per row


@runtime_checkable
class Journal(Protocol):
    """Undo log of one leaf cache (any cache but a `CacheList`).

    The model first writes to `presented`, in any number of forwards. Then either
    `prepare(keep)` and `commit(keep)` are called, or `rollback()`. After a commit and
    before any other write, `rollback()` undoes the commit as well.
    """

    @property
    def presented(self) -> Any:
        """The cache that the model receives for this layer.

        It is truthy, has no `__len__`, and returns exactly what mlx-lm's cache would
        return.
        """
        ...

    @property
    def live(self) -> bool:
        """Return whether the model writes to the live cache itself, not to a copy."""
        ...

    @property
    def rows(self) -> int | None:
        """Number of sequences in the batch; None: unknown, as the cache is empty."""
        ...

    @property
    def written(self) -> int | None:
        """Positions written so far; None: unknown, so only all or none can be kept."""
        ...

    def prepare(self, keep: Any) -> None:
        """Do every part of `commit(keep)` that can fail. The cache is not changed."""
        ...

    def commit(self, keep: Any) -> None:
        """Keep the first `keep` written positions; call `prepare` before.

        `keep` is at least 1. For a batch, it can be a sequence with a number for each
        row.
        """
        ...

    def rollback(self) -> None:
        """Restore the cache as it was when the journal was opened. Never raises."""
        ...

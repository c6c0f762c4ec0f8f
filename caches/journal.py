"""The journal of one cache during a speculation.

A journal presents one leaf cache to the model and can keep a prefix of what the
model wrote, or undo all of it. It knows one cache and nothing about the others, the
model or the text; `Speculation` keeps the journals of all layers in step.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

Keep = int | Sequence[int]  # one number for all rows of the batch, or one for each


@runtime_checkable
class Journal(Protocol):
    """Undo log of one leaf cache.

    The order of calls is: the model writes to `presented` (any number of forwards),
    then `prepare(keep)` and `commit(keep)`, or `rollback()`. After a commit and
    before any other write, `rollback()` takes the commit back as well.
    """

    @property
    def presented(self) -> Any:
        """The cache that the model receives in this layer's place.

        It is truthy, has no `__len__`, and returns exactly what the native cache
        would return.
        """
        ...

    @property
    def live(self) -> bool:
        """Return whether the model writes to the live cache itself."""
        ...

    @property
    def rows(self) -> int | None:
        """Rows that may keep different numbers; None when an empty batch cannot say."""
        ...

    @property
    def written(self) -> int | None:
        """Positions written since the journal was opened.

        None when unknown: then all of them can be kept, or none.
        """
        ...

    def prepare(self, keep: Any) -> None:
        """Do everything of `commit(keep)` that can fail; changes nothing live."""
        ...

    def commit(self, keep: Any) -> None:
        """Keep the first `keep` written positions, from 1. Legal after `prepare`.

        Of several rows, `keep` may be a sequence with a number for each.
        """
        ...

    def rollback(self) -> None:
        """Put the cache back as it was when the journal was opened. Never raises."""
        ...

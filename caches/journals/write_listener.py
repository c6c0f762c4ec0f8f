"""What a model gets in a live cache's place, where the journal listens to writes.

It is of a class of its own and shares the live cache's `__dict__`, so that every
attribute that a model reads or sets is the live one. The journal stands in a slot,
outside of that dict.
"""

import weakref
from typing import Any, Generic, TypeVar

JournalT = TypeVar("JournalT")


class ListenedTo(Generic[JournalT]):
    """The first base of a presented class; the second is the native one."""

    __slots__ = ("_journal",)
    _journal: "weakref.ref[JournalT]"  # strong, it would be a cycle

    @property
    def journal(self) -> JournalT:
        """The journal that is called on every write, while its round lasts."""
        journal = self._journal()
        assert journal is not None
        return journal


def listened_to_by(journal: Any, kind: Any, cache: Any) -> Any:
    """Return a `kind`, a `ListenedTo` subclass, that is the live cache to a model."""
    presented = object.__new__(kind)
    presented.__dict__ = cache.__dict__
    presented._journal = weakref.ref(journal)
    return presented

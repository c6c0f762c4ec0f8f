"""Journals whose model writes to the live cache, and what the model gets in its place.

What it gets may be of a class of its own that shares the live cache's `__dict__`, so
that every attribute that a model reads or sets is the live one. What such an object
holds beside the cache stands in slots, outside of that dict.
"""

import weakref
from typing import Any, Generic, TypeVar

JournalT = TypeVar("JournalT")


class LiveJournal:
    """Base of journals on live caches; one that can refuse a part says so.

    Attributes:
        presented: what the model gets: the live cache, or what shares its attributes.
    """

    __slots__ = ()
    live = True
    presented: Any

    @property
    def rows(self) -> int | None:
        """Sequences that may keep different numbers: one."""
        return 1

    def prepare(self, keep: Any) -> None:
        """Nothing can fail."""


class ListenedTo(Generic[JournalT]):
    """The first base of a presented class whose journal is called on every write."""

    __slots__ = ("_journal",)
    _journal: "weakref.ref[JournalT]"  # strong, it would be a cycle

    @property
    def journal(self) -> JournalT:
        """The journal, while its round lasts."""
        journal = self._journal()
        assert journal is not None
        return journal


def sharing(cache: Any, kind: Any) -> Any:
    """Return a `kind`, a subclass of the cache's own, that is the live cache."""
    presented = object.__new__(kind)
    presented.__dict__ = cache.__dict__
    return presented


def listened_to_by(journal: Any, kind: Any, cache: Any) -> Any:
    """Return a `kind`, a `ListenedTo` subclass, that is the live cache to a model."""
    presented = sharing(cache, kind)
    presented._journal = weakref.ref(journal)
    return presented

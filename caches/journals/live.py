"""Base classes of journals that let the model write to the live cache.

The model gets the live cache or a view of it. A view is an object of a subclass, with
the live cache's `__dict__`: every attribute that the model reads or sets is the live
cache's. The view's own data are in slots, outside of that dict.
"""

import weakref
from typing import Any, Generic, TypeVar

JournalT = TypeVar("JournalT")


class LiveJournal:
    """Base of journals on live caches."""

    __slots__ = ()
    live = True
    presented: Any  # the live cache, or an object that shares its attributes

    @property
    def rows(self) -> int | None:
        """Number of rows, each with a `keep` of its own; by default 1."""
        return 1

    def prepare(self, keep: Any) -> None:
        """Do nothing: by default no part of a commit can fail."""


class ListenedTo(Generic[JournalT]):
    """First base class of views that call their journal."""

    __slots__ = ("_journal",)
    _journal: "weakref.ref[JournalT]"  # weak: a strong one makes a cycle

    @property
    def journal(self) -> JournalT:
        """The journal, which lives until the end of its round."""
        journal = self._journal()
        assert journal is not None
        return journal


def sharing(cache: Any, kind: Any) -> Any:
    """Return a view of the cache; `kind`, its class, is a subclass of the cache's."""
    presented = object.__new__(kind)
    presented.__dict__ = cache.__dict__
    return presented


def listened_to_by(journal: Any, kind: Any, cache: Any) -> Any:
    """Return a view that calls `journal`; its class `kind` is a `ListenedTo`."""
    presented = sharing(cache, kind)
    presented._journal = weakref.ref(journal)
    return presented

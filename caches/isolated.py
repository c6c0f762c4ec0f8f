"""A journal of any kind that writes nothing live before the commit.

The model writes to a twin: an object of the same class with the same attributes, the
arrays detached and the lists copied. An ordinary journal of the twin keeps a prefix
or undoes it, and the commit then gives the live cache the twin's attributes in one
step. Until then a reader of the live cache, or a crash at any line, meets it as it was:

    opened                     live: offset 5, buffer A     twin: offset 5, buffer A
    the model writes 3 rows    live: offset 5, buffer A     twin: offset 8, buffer B
    commit(1)                  live: offset 6, buffer B
    rollback()                 live: offset 5, buffer A

The price: the twin's first write copies the whole buffer, since A has two owners then,
and A and B are both in memory until the speculation object is gone. An ordinary
speculation copies nothing of a KV cache.

It knows no kind of cache: what it cannot copy it refuses. What journals remember of
a cache beside its attributes (the saved rows of a ring) they remember of an object, so
a twin begins without, and pays for its own.
"""

from collections.abc import Callable
from numbers import Number
from typing import Any

import mlx.core as mx

from mlx_speculation.caches.checked_writes import check_writes
from mlx_speculation.caches.journal import Journal
from mlx_speculation.errors import UnsupportedCacheError

_UNCHANGING = (type(None), Number, str, bytes, mx.Dtype)


def twin_of(cache: Any) -> Any:
    """Return an object of the same class; writes to it do not reach `cache`.

    Raises:
        UnsupportedCacheError: an attribute is of a type that cannot be copied safely.
    """
    twin = object.__new__(type(cache))
    twin.__dict__ = {
        name: _detached(value, f"{type(cache).__name__}.{name}")
        for name, value in vars(cache).items()
    }
    return twin


def _detached(value: Any, place: str) -> Any:
    """Copy the containers; an array gets a second owner, so that a write copies it."""
    if isinstance(value, mx.array):
        return value[...]
    if type(value) in (list, tuple):
        return type(value)(_detached(item, place) for item in value)
    if type(value) is dict:
        return {key: _detached(item, place) for key, item in value.items()}
    if isinstance(value, _UNCHANGING):
        return value
    raise UnsupportedCacheError(
        f"{place} holds a {type(value).__name__}, and isolated=True can copy arrays, "
        "numbers, text, and lists, tuples and dicts of them. Take it off the cache, or "
        "open the speculation without isolated=True."
    )


class IsolatedJournal:
    """Journal of one cache of any kind; the live cache changes at commit only.

    Writes to `presented` are checked before they are made, see `checked_writes`.

    Args:
        cache: the live cache.
        open_journal: opens the ordinary journal of this kind, for the twin.
    """

    live = False

    def __init__(self, cache: Any, open_journal: Callable[[Any], Journal]) -> None:
        self._cache = cache
        self._before = vars(cache)  # the dict itself: nothing changes it until then
        self._twin = twin_of(cache)
        self._inner = open_journal(self._twin)
        self._presented = self._inner.presented
        check_writes(self._presented, type(cache).__name__)

    @property
    def presented(self) -> Any:
        """What an ordinary journal of the twin presents."""
        return self._presented

    @property
    def written(self) -> Any:
        """What an ordinary journal of the twin says."""
        return self._inner.written

    def prepare(self, keep: int) -> None:
        """Prepare the twin."""
        self._inner.prepare(keep)

    def commit(self, keep: int) -> None:
        """Commit on the twin, then give the live cache its attributes in one step."""
        self._inner.commit(keep)
        self._cache.__dict__ = dict(vars(self._twin))

    def rollback(self) -> None:
        """Give the live cache its own attributes back; before a commit it has them."""
        self._cache.__dict__ = self._before

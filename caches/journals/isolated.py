"""A journal of any kind of cache that leaves the live cache alone until the commit.

The model writes to a twin: an object of the same class with the same attributes, the
arrays detached and the lists copied. An ordinary journal of the twin keeps a prefix or
undoes it. The commit then gives the live cache the twin's attributes in one step. Until
then the live cache does not change, whatever line fails:

    opened                     live: offset 5, buffer A     twin: offset 5, buffer A
    the model writes 3 rows    live: offset 5, buffer A     twin: offset 8, buffer B
    commit(1)                  live: offset 6, buffer B
    rollback()                 live: offset 5, buffer A

The twin's first write copies the whole buffer, since A has two owners then, and both A
and B are in memory as long as the speculation object. An ordinary speculation copies
nothing of a KV cache.

A cache with values that cannot be copied is refused. The rows that journals save of a
ring belong to one object, so a twin saves its own. A twin of a batch cache takes over
the bound of its shared padding, see `batch_kv`.
"""

from collections.abc import Callable
from numbers import Number
from typing import Any

import mlx.core as mx

from mlx_speculation.caches.journal import Journal, Keep
from mlx_speculation.caches.journals.batch_kv import loose, set_loose
from mlx_speculation.caches.journals.checked_writes import check_writes
from mlx_speculation.caches.types.shared_rows import native_type
from mlx_speculation.errors import UnsupportedCacheError

_UNCHANGING = (type(None), Number, str, bytes, mx.Dtype)


def twin_of(cache: Any) -> Any:
    """Return a copy, whose class is mlx-lm's; writes to it do not reach `cache`.

    The copy is not watched, since no snapshot shares rows with it.

    Raises:
        UnsupportedCacheError: an attribute is of a type that cannot be copied safely.
    """
    twin: Any = object.__new__(native_type(cache))
    twin.__dict__ = {
        name: _detached(value, f"{type(cache).__name__}.{name}")
        for name, value in vars(cache).items()
    }
    return twin


def _detached(value: Any, place: str) -> Any:
    """Copy containers; give arrays a second owner, so that a write copies them."""
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
    """Journal of one cache of any kind; the live cache changes only at the commit.

    Each write to `presented` is checked first; see `checked_writes`.
    """

    live = False

    def __init__(self, cache: Any, twin: Any, inner: Journal) -> None:
        self._cache, self._twin, self._inner = cache, twin, inner
        self._before = vars(cache)  # the dict itself, which stays as it is
        self._loose = loose(cache)
        set_loose(twin, self._loose)
        self.presented = inner.presented
        check_writes(self.presented, type(cache).__name__)

    @property
    def written(self) -> int | None:
        """Positions written to the twin since the journal was opened."""
        return self._inner.written

    @property
    def rows(self) -> int | None:
        """Number of rows that may keep different numbers; see `Journal`."""
        return self._inner.rows

    def prepare(self, keep: Keep) -> None:
        """Prepare the twin."""
        self._inner.prepare(keep)

    def commit(self, keep: Keep) -> None:
        """Commit on the twin, then give the live cache its attributes in one step."""
        self._inner.commit(keep)
        self._cache.__dict__ = dict(vars(self._twin))
        set_loose(self._cache, loose(self._twin))

    def rollback(self) -> None:
        """Give the live cache its old attributes back, which a commit replaced."""
        self._cache.__dict__ = self._before
        set_loose(self._cache, self._loose)


def isolate(cache: Any, open_journal: Callable[[Any], Journal]) -> Journal:
    """Return a journal of `cache` that writes to a twin."""
    twin = twin_of(cache)
    return IsolatedJournal(cache, twin, open_journal(twin))

"""Journal for caches of every kind, which changes the live cache only at the commit.

The model writes to a twin. The twin is a deep copy of the live cache, and shares the
live arrays' buffers until a write. An ordinary journal of the twin keeps a prefix of
the writes or undoes them. The commit then gives the live cache the twin's attributes in
one step. Before this step the live cache does not change, whatever fails:

    opened                     live: offset 5, buffer A     twin: offset 5, buffer A
    the model writes 3 rows    live: offset 5, buffer A     twin: offset 8, buffer B
    commit(1)                  live: offset 6, buffer B
    rollback()                 live: offset 5, buffer A

The twin's first write copies the whole buffer, since A then has two owners. A and B
both stay in memory as long as the speculation object exists.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from mlx_speculation.caches.journal import Journal, Keep
from mlx_speculation.errors import UnsupportedCacheError


class IsolatedJournal:
    """Journal of one cache of any kind; the live cache changes only at the commit."""

    live = False

    def __init__(self, cache: Any, twin: Any, inner: Journal) -> None:
        self._cache, self._twin, self._inner = cache, twin, inner
        self._before = vars(cache)  # the dict itself, which stays as it is
        self.presented = inner.presented

    @property
    def written(self) -> int | None:
        """Positions written to the twin since the journal was opened."""
        return self._inner.written

    @property
    def rows(self) -> int | None:
        """Number of sequences in the batch; see `Journal`."""
        return self._inner.rows

    def prepare(self, keep: Keep) -> None:
        """Prepare the twin."""
        self._inner.prepare(keep)

    def commit(self, keep: Keep) -> None:
        """Commit on the twin; give its attributes to the live cache in one step."""
        self._inner.commit(keep)
        self._cache.__dict__ = dict(vars(self._twin))

    def rollback(self) -> None:
        """Give the live cache back the attributes that it had before a commit."""
        self._cache.__dict__ = self._before


def isolate(cache: Any, open_journal: Callable[[Any], Journal]) -> Journal:
    """Return a journal of `cache` with which the model writes to a twin."""
    try:
        twin = deepcopy(cache)
    except Exception as error:
        raise UnsupportedCacheError(
            f"A {type(cache).__name__} cannot be copied ({error}), and isolated=True "
            "needs a copy. Remove from the cache what cannot be copied, or open the "
            "speculation without isolated=True."
        ) from error
    return IsolatedJournal(cache, twin, open_journal(twin))

"""The transaction over all caches of a model.

    with Speculation(caches) as speculation:
        logits = model(tokens, cache=speculation.caches)   # say, 5 rows
        speculation.commit(3)                              # the first 3 stay

Leaving the block without a commit rolls back. All layers of a model share masks and
offsets, so they keep the same number of positions. For batch caches,
`commit([3, 0, 5])` keeps 3, 0 and 5 positions of rows 0, 1 and 2.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NoReturn

from mlx_speculation.caches.journal import Journal, Keep
from mlx_speculation.caches.journals.kv import KVJournals
from mlx_speculation.caches.keep_counts import check_written, numbers, per_row, shown
from mlx_speculation.caches.nbytes import bytes_beside
from mlx_speculation.caches.registry import (
    check_fixed,
    check_supported,
    open_fixed,
    open_journals,
    presented,
)
from mlx_speculation.caches.types.fixed_view import FixedShape
from mlx_speculation.caches.types.leaves import position
from mlx_speculation.caches.types.padded_kv import steps_of_a_round
from mlx_speculation.caches.types.tree_view import check_trees, move_rows
from mlx_speculation.errors import (
    InvalidRequestError,
    SpeculationClosedError,
    UnsupportedCacheError,
)

Rerun = Callable[[int], None]

_HOW_TO_USE = """
A speculation is used once, inside its block:

    with Speculation(caches) as speculation:
        logits = model(tokens, cache=speculation.caches)
        speculation.commit(keep)
"""


class Speculation:
    """The writes of one round to a model's caches, of which a prefix is kept.

    Args:
        caches: mlx-lm caches, one per layer as `make_prompt_cache` returns them.
        whole: promise that all or nothing will be kept. Recurrent layers then record
            nothing, which saves memory in a long prompt. If the model has only such
            layers, `keep` cannot be checked, and any number but 0 keeps all.
        rerun: function that feeds the model the first n tokens of this round again. If
            a recurrent layer's mixer records nothing, a commit of a part rolls
            everything back and calls `rerun(keep)`.
        isolated: let the model write to copies; `commit` gives the kept part to
            `caches`. The first write copies every buffer.
        key_steps: pad the keys to whole steps of rows where this is faster, see
            `caches/types/padded_kv.py`. Only for models that were tested with padded
            keys. Has no effect with `isolated`.
        shape: shape of the one forward of this round in exact mode, see
            `caches/types/fixed_view.py`. The model is fed `shape.rows` rows; padding
            rows are undone like rejected drafts. Excludes `whole`, `isolated` and
            `key_steps`.

    Attributes:
        open: True until the speculation is committed or rolled back.
        reran: whether the commit ran the model again.

    Raises:
        UnsupportedCacheError: a cache is of an unknown kind, or, with `isolated`, it
            holds a value that cannot be copied.
        InvalidRequestError: one cache object is in two places, there is no cache, or
            `shape` was passed with an option that it excludes.
    """

    def __init__(
        self,
        caches: Sequence[Any],
        *,
        whole: bool = False,
        rerun: Rerun | None = None,
        isolated: bool = False,
        key_steps: bool = False,
        shape: FixedShape | None = None,
    ) -> None:
        self._whole, self._rerun = whole, rerun
        self._live = list(caches)
        steps = steps_of_a_round() if key_steps and not isolated else None
        self._opened: list[Journal] = []
        # If the model has KV caches only, journals are made when one is needed.
        self._unopened: KVJournals | None = None
        if steps is None and not isolated and shape is None:
            self._unopened = KVJournals.of(self._live)
        if self._unopened is not None:
            self._presented = list(caches)
        elif shape is not None:
            if whole or isolated or key_steps:
                raise InvalidRequestError(
                    "shape was passed together with whole, isolated or key_steps. Pass "
                    "shape alone, or leave it out."
                )
            self._live = check_fixed(caches)
            self._opened = open_fixed(self._live, shape)
            self._presented = presented(caches, iter(self._opened))
        else:
            self._live = check_supported(caches)
            self._opened = open_journals(
                self._live, whole=whole, isolated=isolated, steps=steps
            )
            self._presented = presented(caches, iter(self._opened))
        # The journals that `commit` calls, or one `KVJournals` instead.
        self._to_change: list[Any] = []
        self._prepared: int | tuple[int, ...] | None = None
        self._keep: int | tuple[int, ...] = 0
        self._needs_rerun = False
        self.open = True
        self.reran = False

    @property
    def _leaves(self) -> list[Journal]:
        """The journals of all leaf caches, made at the first access."""
        if self._unopened is not None:
            self._opened = [*self._unopened.opened()]
            self._unopened = None
        return self._opened

    @property
    def caches(self) -> list[Any]:
        """The caches to pass to the model as `cache`."""
        if not self.open:
            self._refuse("caches")
        return self._presented

    @property
    def only_kv(self) -> bool:
        """Return whether all caches are `KVCache`, and no journal was needed yet."""
        return self._unopened is not None

    @property
    def start(self) -> int | None:
        """Positions in the caches, if read before the first write; None: unknown.

        Raises:
            InvalidRequestError: a cache holds a batch.
        """
        if self._unopened is not None:
            return self._unopened.start
        return position(self._live)

    @property
    def written(self) -> int | None:
        """Positions written so far; None: no layer counts or records them."""
        known = [w for leaf in self._leaves if (w := leaf.written) is not None]
        return max(known, default=None)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that only journals hold; valid until the commit."""
        return bytes_beside(self._leaves, self._live)

    def move(self, rows: Sequence[int]) -> None:
        """Move these rows before the other written rows, so that they are a prefix.

        `rows` are indices among the written rows, in rising order. Can be called after
        one forward that was fed a tree, before `prepare`. A rollback undoes the move.

        Raises:
            InvalidRequestError: the rows are not in order, or not all written, or the
                speculation is isolated.
            UnsupportedCacheError: a cache is of a kind that holds no trees.
            SpeculationClosedError: the speculation is closed.
        """
        if not self.open:
            self._refuse("move")
        check_trees(self._live)
        wrote = None if self._unopened is None else self._unopened.wrote()
        each = {leaf.written for leaf in self._leaves} if wrote is None else {wrote}
        written = max((count or 0 for count in each), default=0)
        ordered = all(low < high for low, high in pairwise((-1, *rows, written)))
        live = wrote is not None or all(leaf.live for leaf in self._leaves)
        if not ordered or not live or len(each) > 1:
            raise InvalidRequestError(
                f"move({[*rows]}) needs rows in rising order, each below {written}, "
                "the number of written positions. Every layer must have written the "
                "same number, and the speculation must not be isolated. Pass the rows "
                "of one path."
            )
        move_rows(self._live, written, rows)

    def prepare(self, keep: Keep) -> None:
        """Do every part of `commit(keep)` that can fail, and change no cache yet.

        Raises:
            InvalidRequestError: a number in `keep` is negative or more than was
                written, or `keep` does not have one number for each row.
            UnsupportedCacheError: a layer cannot keep a part, and the model cannot run
                again: there is no `rerun`, or the rows keep different numbers.
            SpeculationClosedError: the speculation is closed.
        """
        if not self.open:
            self._refuse("prepare")
        unopened = self._unopened
        wrote = None if unopened is None else unopened.wrote()
        if (
            wrote is not None
            and isinstance(keep, int)
            and (keep == wrote or not self._whole)
            and 0 < keep <= wrote
        ):
            self._to_change = [] if keep == wrote else [unopened]
            self._prepared = self._keep = keep
            return
        counts = keep if isinstance(keep, int) else numbers(keep)
        keep = counts if isinstance(counts, int) else per_row(counts, self._leaves)
        each = [leaf.written for leaf in self._leaves]
        written: int | None = each[0]
        if not (written and keep == written and each.count(written) == len(each)):
            written = check_written(keep, each, whole=self._whole)
        whole = self._whole or keep in (0, written)
        self._needs_rerun = not whole and None in each
        if self._needs_rerun and (self._rerun is None or not isinstance(keep, int)):
            raise UnsupportedCacheError(
                f"A layer cannot keep {shown(keep)} of {written} positions: its mixer "
                "was not recorded. Install the recorders of mlx_speculation.models, or "
                "pass rerun=, a function that feeds the kept tokens again, and keep "
                "the same number of every row."
            )
        if keep != 0 and not self._needs_rerun:
            everything = keep == written
            self._to_change = [j for j in self._leaves if not (everything and j.live)]
            for journal in self._to_change:
                journal.prepare(keep)
        self._prepared = counts
        self._keep = keep

    def commit(self, keep: Keep) -> None:
        """Keep the first `keep` positions written, and close the speculation.

        A list has a number for each row of batch caches. The errors are those of
        `prepare`, raised before anything changes. After `prepare(keep)`, only `rerun`
        can fail. If it fails, everything stays rolled back.
        """
        if not self.open:
            self._refuse("commit")
        if self._prepared != (keep if isinstance(keep, int) else numbers(keep)):
            self.prepare(keep)
        keep = self._keep
        if keep == 0:
            self.rollback()
        elif not self._needs_rerun:
            for journal in self._to_change:
                journal.commit(keep)
            self.open = False
        else:
            self.rollback()
            assert self._rerun is not None
            assert isinstance(keep, int)
            self._opened = []  # a later `rollback` must not undo what the rerun writes
            self.reran = True
            self._rerun(keep)

    def rollback(self) -> None:
        """Restore every cache as it was at the start, and close. Never raises.

        Until the next write it also undoes a commit that called no `rerun`.
        """
        for journal in self._leaves:
            journal.rollback()
        self.open = False

    def __enter__(self) -> "Speculation":
        if not self.open:
            self._refuse("with")
        return self

    def __exit__(self, *error: object) -> None:
        if self.open:
            self.rollback()

    def _refuse(self, what: str) -> NoReturn:
        raise SpeculationClosedError(
            f"{what} was used on a speculation that is closed.\n{_HOW_TO_USE}"
        )

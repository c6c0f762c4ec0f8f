"""What drafts for the rows of a batch: the protocol, and what its kinds share."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import mlx.core as mx

from mlx_speculation.engine.batch.request import BatchRequest
from mlx_speculation.engine.drafters.base import NOTHING, Proposal
from mlx_speculation.engine.drafters.fault_guard import what_is_wrong
from mlx_speculation.samplers import VerifyRequest, peaks, propose_batch


class BatchDrafter(Protocol):
    """Drafts for many rows; what is not overridden does nothing.

    `follow` comes before every round. The calls of one that drafts: `prepare`,
    `propose`, then `settle` and `done`, or `discard`.
    """

    @property
    def ahead(self) -> bool:
        """Whether it can draft behind a token that is not read yet."""
        return False

    @property
    def nbytes(self) -> int:
        """Bytes of what it holds for all rows together."""
        return 0

    def met_new_shapes(self) -> bool:
        """Return whether a lane of its own met new shapes since the last call."""
        return False

    def follow(self, rows: Sequence[BatchRequest]) -> None:
        """Take notice of the rows of the next round, in their order."""
        return

    def within(self, rows: Sequence[BatchRequest], limits: list[int]) -> list[int]:
        """Return how many tokens each row can draft, of at most its limit."""
        return limits

    def prepare(self, rows: Sequence[BatchRequest], limits: Sequence[int]) -> None:
        """Read of the rows what no round should be measured with: prompts, mostly."""
        return

    def propose(
        self, rows: Sequence[BatchRequest], limits: Sequence[int], ahead: int
    ) -> list[Proposal]:
        """Return a draft of each row, of at most its limit; 0 and less: none.

        Where a request's own processors raise, the row's `error` is set.

        Args:
            rows: all rows of the batch, in their order.
            limits: how many tokens each may draft, those ahead not counted.
            ahead: how many tokens of a step are not known yet, 0 or 1: the drafts
                stand for them in their first place.
        """
        ...

    def rectangle(self, drafts: Sequence[Proposal], width: int) -> mx.array:
        """Return the tokens of drafts, uint32 [rows, width]; behind short ones any."""
        ...

    def settle(self, accepted: Sequence[int | None]) -> None:
        """Keep so many tokens of each row's draft; None: the row has failed.

        Legal once the round was read. Must not raise for what a drafter does.
        """
        ...

    def discard(self) -> None:
        """Undo the last `propose` and `settle`. Never raises."""
        ...

    def done(self) -> None:
        """Let go of what could undo the round: the target has committed its own."""
        return

    def leave(self, gone: Sequence[BatchRequest]) -> None:
        """Let go of rows."""
        ...


@contextmanager
def disabling(
    drafter: BatchDrafter, call: str, rows: Sequence[BatchRequest]
) -> Iterator[None]:
    """Give up on a drafter for these rows where it raises; the texts go on.

    As for one row, see `engine.drafters.fault_guard`. Its round is undone in any case.

    Raises:
        BaseException: what is no fault of a drafter, such as MemoryError.
    """
    try:
        yield
    except BaseException as error:
        drafter.discard()
        if not isinstance(error, Exception) or isinstance(error, MemoryError):
            raise
        for row in rows:
            row.drafter.fail(call, error)
        drafter.leave(rows)


class BatchChain:
    """What is drafted for some rows in one round. Nothing of it is read.

    Args:
        rows: for whom.
        ids: the target's ids of the drafter's logits, uint32 [n]; None: all.

    Attributes:
        unusable: bool [rows], whether logits of a row could not be used.
    """

    def __init__(
        self, rows: Sequence[BatchRequest], ids: mx.array | None = None
    ) -> None:
        self._rows, self._ids = rows, ids
        self._columns: list[mx.array] = []
        self._probs: list[list[mx.array]] = [[] for _ in rows]
        # As alone, unusable logits are replaced only where they could do harm.
        self._replaces = not all(row.request.verifier.indifferent for row in rows)
        self.unusable = mx.zeros((len(rows),), mx.bool_)

    @property
    def tokens(self) -> mx.array:
        """What was chosen, uint32 [rows, k]."""
        return mx.stack(self._columns, axis=1)

    def choose(self, logits: mx.array) -> mx.array:
        """Choose the next token of every row, uint32 [rows], and let it be computed.

        The logits are [rows, vocab], or [rows, n] of the ids. Where a request's own
        processors raise, the row's `error` is set.
        """
        usable = mx.isfinite(peaks(logits))
        self.unusable = self.unusable | ~usable
        if self._replaces:
            logits = mx.where(usable[:, None], logits, mx.array(0, logits.dtype))
        proposed = propose_batch(self._asked(), logits, self._ids)
        for place, error in proposed.failed.items():
            self._rows[place].error = error
        for place, probs in proposed.probs.items():
            self._probs[place].append(probs)
        self._columns.append(proposed.tokens)
        mx.async_eval(proposed.tokens)  # runs while the next step's graph is built
        return proposed.tokens

    def drafts(self, limits: Sequence[int], source: str) -> list[Proposal]:
        """Return each row's draft, cut to its limit."""
        tokens, found = self.tokens, []
        for place, (row, limit) in enumerate(zip(self._rows, limits, strict=True)):
            each = self._probs[place][:limit]
            probs = mx.concatenate(each) if each else None
            drafts = limit > 0 and row.error is None
            draft = (
                Proposal(tokens[place, :limit], probs, source) if drafts else NOTHING
            )
            found.append(draft)
        return found

    def disable_unusable(self) -> None:
        """Disable the drafter for rows whose logits could not be used, once read."""
        unusable: Any = self.unusable.tolist()
        for row, failed in zip(self._rows, unusable, strict=True):
            if failed:
                row.drafter.fail("propose", what_is_wrong(1, 0))

    def _asked(self) -> list[VerifyRequest]:
        """Return what each row asks of the next token, behind those drafted."""
        columns = self._columns
        placeholder = mx.zeros((len(columns),), mx.uint32) if columns else None
        matrix = None
        asked = []
        for place, row in enumerate(self._rows):
            ahead = placeholder
            if columns and row.request.verifier.shared is None:
                matrix = mx.stack(columns, axis=1) if matrix is None else matrix
                ahead = matrix[place]
            rows = row.request.sequence.rows(ahead)
            asked.append(VerifyRequest(row.request.verifier, rows))
        return asked


def rectangle(drafts: Sequence[Proposal], width: int) -> mx.array:
    """Return drafted tokens uint32 [rows, width], shorter ones padded with 0."""
    rows = [
        mx.pad(draft.tokens, (0, width - draft.length))
        if draft.length < width
        else draft.tokens[:width]
        for draft in drafts
    ]
    return mx.stack(rows)


class SharedDrafter(BatchDrafter):
    """What drafts for many rows with caches of its own, which hold them together."""

    def __init__(self) -> None:
        self._rows: list[BatchRequest] = []  # those in the caches, in their order
        self._places: list[int] = []  # where they stand in the batch
        self._round: Any = None
        self._before: Any = None  # what it held beside the caches, before it settled
        self._chain: BatchChain | None = None

    def rectangle(self, drafts: Sequence[Proposal], width: int) -> mx.array:
        """Return them as they were chosen, if all rows drafted and in their order."""
        if self._chain is not None and self._places == list(range(len(drafts))):
            return self._chain.tokens[:, :width]
        return rectangle(drafts, width)

    def discard(self) -> None:
        """Undo the round, also after it was settled."""
        if self._round is not None:
            self._round.rollback()
        if self._before is not None:
            self._restore(self._before)
        self.done()

    def done(self) -> None:
        """Let go of the round, and of the states that it began with."""
        self._round = self._before = self._chain = None

    @abstractmethod
    def _restore(self, before: Any) -> None:
        """Hold again what was held before the round settled."""

    def _place(self, rows: Sequence[BatchRequest]) -> None:
        """Find where its rows stand in the batch."""
        order = {row.uid: place for place, row in enumerate(rows)}
        self._places = [order[row.uid] for row in self._rows]

    def _staying(self, gone: Sequence[BatchRequest]) -> list[int]:
        """Return which of its rows are not gone, and have a drafter still."""
        lost = {row.uid for row in gone}
        return [
            place
            for place, row in enumerate(self._rows)
            if row.uid not in lost and not row.drafter.disabled
        ]

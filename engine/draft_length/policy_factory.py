"""The factory of draft length policies, which share costs, acceptance and credit."""

import sys
from typing import Any

import mlx.nn as nn

from mlx_speculation.caches import FixedShape
from mlx_speculation.engine.argument_checks import checked_count
from mlx_speculation.engine.draft_length.base import DraftLengthPolicy, FixedDraftLength
from mlx_speculation.engine.draft_length.costs import Source
from mlx_speculation.engine.draft_length.rule import BATCH_CREDIT, Credit
from mlx_speculation.engine.draft_length.ruled import BatchDraftLength, RuleDraftLength
from mlx_speculation.engine.drafters.draft import Draft, members_of, shape_of
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import usual_part

LONGEST = 16  # the longest adaptive draft
Length = int | DraftLengthPolicy | None


class PolicyFactory:
    """Makes policies. With trees, draft lengths are numbers of levels."""

    def __init__(
        self,
        model: nn.Module,  # the target
        draft: Draft | None,  # None: plain decoding
        usual: int | None,  # the length of streams that pass none; None: adaptive
        *,
        shape: FixedShape | None = None,  # of exact mode
        **others: Any,  # other options on which costs depend, in JSON types
    ) -> None:
        self.usual = _checked(usual, "draft_length")
        self._model, self._draft = model, draft
        self._others = {"exact": shape and shape.rows, **others}
        self.longest = LONGEST if shape is None else min(LONGEST, shape.rows - 1)
        self._known: dict[int, list[Source]] = {}  # by rows of a batch; 0: of streams
        # For streams without a prediction, for streams with one, and for batches
        self._credits, self._batch_credit = (Credit(), Credit()), Credit(*BATCH_CREDIT)

    def for_stream(
        self, length: Length, most: int | None = None, *, predicted: bool = False
    ) -> DraftLengthPolicy:
        """Return the policy of one stream, limited to drafts of `most` tokens.

        Raises:
            InvalidRequestError: an argument is no number, or a policy came with `most`.
        """
        most = _checked(most, "max_draft")
        if isinstance(length, DraftLengthPolicy):
            if most is not None:
                raise InvalidRequestError(
                    f"max_draft is {most}, but draft_length is a "
                    f"{type(length).__name__}, which alone decides how long drafts "
                    "are. Pass one of them."
                )
            return length
        length = self.usual if length is None else _checked(length, "draft_length")
        allowed = sys.maxsize if most is None else most
        longest = min(allowed, self.longest)
        if self._draft is None or length is not None or not longest:
            return FixedDraftLength(min(length or 0, allowed))
        return RuleDraftLength(self.sources(), self._credits[predicted], longest)

    def for_batch(self) -> BatchDraftLength:
        """Return the policy of a batch."""
        return BatchDraftLength(self.batch_sources, self._batch_credit, self.longest)

    def batch_sources(self, rows: int) -> list[Source]:
        """Return the sources of a batch with this number of rows.

        Unmeasured costs are taken from the next larger batch, or else a smaller one.
        """
        result, sizes = self.sources(rows), self._known.keys() - {0}
        for index, source in enumerate(result):
            if not source.costs.table():
                near = sorted(sizes, key=lambda n: (n < rows, abs(n - rows)))
                tables = (self._known[n][index].costs.table() for n in near)
                source.costs.kept = next(filter(None, tables), {})
        return result

    @property
    def part(self) -> int:
        """Number of layers that a forward submits at once, see `submit_layers`."""
        measured = self.calibrated().part
        return usual_part() if measured is None else measured

    def sources(self, rows: int = 0) -> list[Source]:
        """Return the sources of a batch; 0: of a stream. Only the costs differ."""
        if rows not in self._known:
            drafts = members_of(self._draft)
            self._known[rows] = [self._source(draft, rows) for draft in drafts]
            for source, usual in zip(self._known[rows], self.sources(), strict=True):
                source.rates = usual.rates
        return self._known[rows]

    def calibrated(self, rows: int = 0) -> Source:
        """Return the source to calibrate: the first not free, else the first."""
        return min(self.sources(rows), key=lambda one: one.free, default=Source())

    def _source(self, draft: Draft, rows: int) -> Source:
        """Return a source with its stored costs; without a cost key none are stored."""
        key, name = None, draft.cost_key()
        if name:
            key = {"target": shape_of(self._model), "draft": [name], **self._others}
            key |= {"rows": rows} if rows else {}
        return Source.read(key, free=draft.free, name=draft.kind)


def _checked(length: Any, name: str) -> int | None:
    if length is None:
        return None
    return checked_count(name, length, 0, ", or None for an adaptive draft length")

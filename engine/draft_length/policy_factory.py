"""The factory of draft length policies, which also stores the costs they measure.

The adaptive rule itself is in `rule`.
"""

from collections.abc import Sequence as SequenceOf
from typing import Any

import mlx.nn as nn

from mlx_speculation.caches import FixedShape
from mlx_speculation.engine.argument_checks import checked_count
from mlx_speculation.engine.draft_length.base import DraftLengthPolicy, FixedDraftLength
from mlx_speculation.engine.draft_length.batched import BatchDraftLength
from mlx_speculation.engine.draft_length.calibration import (
    PartsTable,
    Progress,
    Start,
    measure,
    measure_part,
    most_tokens,
    part_of,
)
from mlx_speculation.engine.draft_length.cost_store import Known
from mlx_speculation.engine.draft_length.costs import CostTable, RoundCosts
from mlx_speculation.engine.draft_length.rule import (
    BATCH_CREDIT,
    PAUSE,
    Credit,
    DraftRule,
    Source,
)
from mlx_speculation.engine.draft_length.ruled import RuleDraftLength
from mlx_speculation.engine.drafters.draft import Draft, members_of, shape_of
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import Sliding, position_table, usual_part

# The longest adaptive draft. In repetitive greedy text longer drafts would be accepted
# too, but each drafted token adds to the time of the target's forward.
LONGEST = 16


class PolicyFactory:
    """Makes a policy for each stream.

    Args:
        model: the target.
        draft: the draft; None: plain decoding.
        sliding: the kind of sliding caches.
        usual: the draft length of streams that pass none; None: adaptive.
        compiled: whether the draft model is compiled.
        shape: the fixed shape of exact mode, which limits the draft length; None: not
            in exact mode.
        tree: how many nodes a drafted tree has; 0: drafts are chains. The draft length
            of a tree is its number of levels.

    Raises:
        InvalidRequestError: the usual length is not a number of tokens.
    """

    def __init__(
        self,
        model: nn.Module,
        draft: Draft | None,
        sliding: Sliding,
        usual: int | None,
        *,
        compiled: bool = False,
        shape: FixedShape | None = None,
        tree: int = 0,
    ) -> None:
        self.usual = _checked(usual, "draft_length")
        self._model, self._draft, self._sliding = model, draft, sliding
        self._compiled, self._shape, self._tree = compiled, shape, tree
        self.longest = LONGEST if shape is None else min(LONGEST, shape.rows - 1)
        self._each = members_of(draft)
        self._known: dict[int, list[Known]] = {}  # by rows of a batch; 0: of streams
        self._credit, self._batch_credit = Credit(), Credit(*BATCH_CREDIT)

    def for_stream(
        self,
        length: int | DraftLengthPolicy | None,
        most: int | None = None,
    ) -> DraftLengthPolicy:
        """Return the policy of a stream.

        Args:
            length: a fixed length, or a policy; None: the usual length.
            most: the longest draft; None: the policy alone decides.

        Raises:
            InvalidRequestError: an argument is not a number of tokens, or `length` is a
                policy and `most` was passed too.
        """
        most = _checked(most, "max_draft")
        if isinstance(length, DraftLengthPolicy):
            if most is not None:
                raise InvalidRequestError(
                    f"max_draft is {most}, and draft_length is a "
                    f"{type(length).__name__}, which says how long drafts are. Pass "
                    "one of them."
                )
            return length
        length = self.usual if length is None else _checked(length, "draft_length")
        longest = self.longest if most is None else min(most, self.longest)
        if self._draft is None or length is not None or not longest:
            length = length or 0
            return FixedDraftLength(length if most is None else min(length, most))
        return RuleDraftLength(self.known(), self._credit, longest)

    def for_batch(self) -> BatchDraftLength:
        """Return the policy of a batch."""
        sources = [
            Source(RoundCosts(), each.free, each.kind, PAUSE) for each in self._each
        ]
        rule = DraftRule(sources, self._batch_credit, self.longest)
        return BatchDraftLength(rule, self.batch_costs, self._credit)

    def batch_costs(self, rows: int) -> list[RoundCosts]:
        """Return the costs of rounds of a batch with so many rows, for each drafter.

        If no batch of this size was measured, the costs are those of the next larger
        measured batch, which leads to drafts that are rather too short. If there is
        none, they are those of the next smaller one.
        """
        result = self.known(rows)
        for index, known in enumerate(result):
            if known.costs.table():
                continue
            others = [
                (n < rows, abs(n - rows), n) for n in self._known if n and n != rows
            ]
            tables = (self.known(n)[index].costs.table() for _, _, n in sorted(others))
            known.costs.kept = next(filter(None, tables), {})
        return [known.costs for known in result]

    @property
    def parts(self) -> PartsTable:
        """Median seconds of calibrated rounds by part."""
        return self.calibrated().parts

    @property
    def part(self) -> int:
        """Number of layers that a forward submits at once, see `submit_layers`."""
        measured = self.calibrated().part
        return usual_part() if measured is None else measured

    def calibrate(
        self,
        start: Start,
        contexts: SequenceOf[int],
        progress: Progress | None = None,
        *,
        part: bool = False,
    ) -> CostTable:
        """Measure the cost of every draft length; see the generator's `calibrate`.

        Args:
            start: starts the streams that are measured.
            contexts: the context lengths to measure at, in tokens.
            progress: called with the number of rounds that are done, and of all rounds.
            part: whether to measure the best `part` first.
        """
        self.check_calibration(contexts)
        if part:
            self.calibrated().part = measure_part(start, min(contexts))
        for number, context in enumerate(sorted(contexts)):
            report = part_of(progress, number, len(contexts))
            self.calibrated().take(measure(start, context, self.longest, report))
        return self.calibrated().costs.table()

    def check_calibration(self, contexts: SequenceOf[int]) -> None:
        """Refuse a calibration without a draft, or at impossible context lengths."""
        if self._draft is None:
            raise InvalidRequestError(
                "The generator has no draft, and there is nothing to calibrate. Pass "
                "one as draft=..."
            )
        if not contexts or any(context < 1 for context in contexts):
            raise InvalidRequestError(
                f"contexts is {list(contexts)}, and at least one number of tokens from "
                "1 is needed."
            )
        positions, tokens = position_table(self._model), most_tokens(self.longest)
        if positions is not None and max(contexts) + tokens > positions:
            raise InvalidRequestError(
                f"The rounds of a calibration may write {tokens} tokens behind a "
                f"context of {max(contexts)}, and the target has a table of "
                f"{positions} positions. Measure at {max(0, positions - tokens)} "
                "tokens at most."
            )

    def known(self, rows: int = 0) -> list[Known]:
        """Return the measured costs of each drafter.

        Args:
            rows: the number of rows of a batch; 0: those of a single stream.
        """
        if rows not in self._known:
            more = {"rows": rows} if rows else {}
            self._known[rows] = [
                Known.read(self._key(draft, **more), free=draft.free, name=draft.kind)
                for draft in self._each
            ]
        return self._known[rows]

    def calibrated(self, rows: int = 0) -> Known:
        """Return the costs of the drafter that a calibration measures: a costly one."""
        each = list(zip(self._each, self.known(rows), strict=True))
        costly = [known for draft, known in each if not draft.free]
        return [*costly, *self.known(rows), Known()][0]

    def _key(self, draft: Draft, **more: int) -> dict[str, Any] | None:
        """Return the key that costs are stored by; None: they are not stored."""
        name = draft.cost_key()
        if not name:
            return None
        return {
            "target": shape_of(self._model),
            "draft": [name],
            "sliding": self._sliding,
            "compiled": self._compiled,
            "exact": self._shape and self._shape.rows,
            **({"tree": self._tree} if self._tree else {}),
            **more,
        }


def _checked(length: Any, name: str) -> int | None:
    if length is None:
        return None
    return checked_count(name, length, 0, ", or None for an adaptive draft length")

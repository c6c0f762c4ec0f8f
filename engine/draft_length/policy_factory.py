"""Makes the draft length policy of each stream, and keeps what they have learnt.

Which length a round has is decided in `adaptive`.
"""

from collections.abc import Sequence as SequenceOf
from typing import Any

import mlx.nn as nn

from mlx_speculation.caches import FixedShape
from mlx_speculation.engine.argument_checks import checked_count
from mlx_speculation.engine.draft_length.acceptance import AcceptanceRates
from mlx_speculation.engine.draft_length.adaptive import (
    SHARE,
    AdaptiveDraftLength,
    Credit,
)
from mlx_speculation.engine.draft_length.base import DraftLengthPolicy, FixedDraftLength
from mlx_speculation.engine.draft_length.calibration import (
    PartsTable,
    Progress,
    Start,
    measure,
    part_of,
)
from mlx_speculation.engine.draft_length.cascade import CascadeDraftLength
from mlx_speculation.engine.draft_length.cost_store import Known
from mlx_speculation.engine.draft_length.costs import CostTable, RoundCosts
from mlx_speculation.engine.drafters.source import DraftSource, members_of, shape_of
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import Sliding

# No adaptive draft length is longer. Greedy text that repeats itself is drafted well
# for longer than that, but a verify of more rows costs by the row.
LONGEST = 16
# What was learnt from earlier streams counts for so many rounds in a new one.
KNOWN_WEIGHT = 8.0


class PolicyFactory:
    """Makes a policy for each stream.

    `usual` is the length of streams that name none, None an adaptive one. A `shape` of
    exact mode limits drafts, and has costs of its own.

    Raises:
        InvalidRequestError: the usual length is not a number of tokens.
    """

    def __init__(
        self,
        model: nn.Module,
        draft: DraftSource | None,
        sliding: Sliding,
        usual: int | None,
        *,
        compiled: bool = False,
        shape: FixedShape | None = None,
    ) -> None:
        self.usual = _checked(usual, "draft_length")
        self._model, self._draft, self._sliding = model, draft, sliding
        self._compiled, self._shape = compiled, shape
        self.longest = LONGEST if shape is None else min(LONGEST, shape.rows - 1)
        self._each = members_of(draft)
        self._known: dict[int, Known] = {}
        self._batches: dict[int, Known] = {}
        self._credit = Credit()

    def for_stream(
        self, length: int | DraftLengthPolicy | None, most: int | None = None
    ) -> DraftLengthPolicy:
        """Return the policy of a stream.

        Args:
            length: None: the usual one.
            most: no draft is longer; None: than the policy says.

        Raises:
            InvalidRequestError: one is not a number of tokens, or the policy is the
                caller's own, and `most` was passed.
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
        policies = [self._policy(index, longest) for index in range(len(self._each))]
        return policies[0] if len(policies) == 1 else CascadeDraftLength(policies)

    def _policy(self, drafter: int, longest: int) -> AdaptiveDraftLength:
        """Return the policy of a stream's drafter."""
        known = self._of_drafter(drafter)
        rates = known.rates.loosened(KNOWN_WEIGHT)
        return AdaptiveDraftLength(
            known.costs,
            rates,
            self._credit,
            longest,
            share=SHARE / len(self._each),
            at_end=known.keep,
        )

    def for_batch(self, rates: AcceptanceRates) -> AdaptiveDraftLength:
        """Return the policy of a batch, whose costs are `batch_costs` of its rows."""
        return AdaptiveDraftLength(
            RoundCosts(),
            rates,
            self._credit,
            self.longest,
            at_end=self._save_batches,
        )

    def batch_costs(self, rows: int, rates: AcceptanceRates) -> RoundCosts:
        """Return what the rounds of batches with so many rows cost.

        Those of so many rows that were never measured begin with the costs of the next
        larger batch that was, which errs to shorter drafts, or of the next smaller.
        Rates that know nothing are set to those that were kept.
        """
        known = self._of_batch(rows)
        if not known.costs.table():
            measured = [n for n in self._batches if self._of_batch(n).costs.table()]
            others = sorted(measured, key=lambda n: (n < rows, abs(n - rows)))
            for other in others[:1]:
                known.costs.take(self._of_batch(other).costs.table())
        if rates.known == 0:
            rates.take(known.rates)
        known.rates = rates
        return known.costs

    def keep_batch(self, rows: int, measured: RoundCosts) -> CostTable:
        """Keep what a calibration has measured; return all that is known then."""
        known = self._of_batch(rows)
        known.costs.take(measured.table())
        known.save()
        return known.costs.table()

    @property
    def parts(self) -> PartsTable:
        """Where the time of calibrated rounds went."""
        return self._of_drafter(self._calibrated).parts

    def calibrate(
        self,
        start: Start,
        contexts: SequenceOf[int],
        progress: Progress | None = None,
    ) -> CostTable:
        """Measure every length at these contexts, see the generator's `calibrate`."""
        self.check_calibration(contexts)
        known = self._of_drafter(self._calibrated)
        for number, context in enumerate(sorted(contexts)):
            report = part_of(progress, number, len(contexts))
            found = measure(start, context, self.longest, report)
            known.parts |= found.parts
            known.costs.take(found.costs.table())
        known.save()
        return known.costs.table()

    def check_calibration(self, contexts: SequenceOf[int]) -> None:
        """Refuse a calibration without a draft, or of contexts that cannot be."""
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

    @property
    def _calibrated(self) -> int:
        """The drafter whose rounds a calibration measures, see `measured_draft`."""
        each = enumerate(self._each)
        return next((index for index, one in each if one.measurable), 0)

    def _of_drafter(self, drafter: int) -> Known:
        if drafter not in self._known:
            key = self._key(self._each[drafter : drafter + 1])
            self._known[drafter] = Known.read(key)
        return self._known[drafter]

    def _of_batch(self, rows: int) -> Known:
        if rows not in self._batches:
            key = self._key(self._each)
            self._batches[rows] = Known.read(key and {**key, "rows": rows})
        return self._batches[rows]

    def _save_batches(self, _: AcceptanceRates) -> None:
        for known in self._batches.values():
            known.save_if_new()

    def _key(self, drafts: SequenceOf[DraftSource]) -> dict[str, Any] | None:
        """Return what the costs belong to; None where they are not kept."""
        names = [source.cost_key() for source in drafts]
        if not all(names):
            return None
        return {
            "target": shape_of(self._model),
            "draft": names,
            "sliding": self._sliding,
            **({"compiled": True} if self._compiled else {}),
            **({"exact": self._shape.rows} if self._shape else {}),
        }


def _checked(length: Any, name: str) -> int | None:
    if length is None:
        return None
    return checked_count(name, length, 0, ", or None for an adaptive draft length")

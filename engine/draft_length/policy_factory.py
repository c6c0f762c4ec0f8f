"""Makes the draft length policy of each stream of a generator; and calibration.

What the policies share is kept here: costs, acceptance, and what trials may lose. Which
length a round has is decided in `adaptive`.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any

import mlx.nn as nn

from mlx_speculation.caches import FixedShape
from mlx_speculation.engine.argument_checks import checked_count
from mlx_speculation.engine.draft_length.acceptance import AcceptanceRates
from mlx_speculation.engine.draft_length.adaptive import AdaptiveLengths
from mlx_speculation.engine.draft_length.base import DraftLengthPolicy, FixedDraftLength
from mlx_speculation.engine.draft_length.calibration import NotingParts, PartsTable
from mlx_speculation.engine.draft_length.cascade import CascadeDraftLength
from mlx_speculation.engine.draft_length.cost_store import Known
from mlx_speculation.engine.draft_length.costs import RoundCosts
from mlx_speculation.engine.draft_length.exploration import Allowance
from mlx_speculation.engine.drafters.early_stop import Certainties
from mlx_speculation.engine.drafters.source import DraftSource, members_of, shape_of
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import Sliding, on_cpu

if TYPE_CHECKING:
    from mlx_speculation.engine.stream import Stream

# No adaptive draft length is longer. Greedy text that repeats itself is drafted well
# for longer than that, but a verify of more rows costs by the row.
LONGEST = 16
# A calibration ends without all lengths when a drafter does not draft as asked.
MOST_ROUNDS = 300
# Plain steps are cheap to measure, and every length is judged by them.
CALIBRATION_SAMPLES, CALIBRATION_PLAIN_SAMPLES = 5, 15


def calibration_prompt(context: int) -> list[int]:
    """Return so many tokens; which they are does not matter."""
    return [1 + index % 7 for index in range(context)]


def calibration_costs() -> RoundCosts:
    """Return costs of which nothing is known, for a calibration."""
    return RoundCosts(
        samples=CALIBRATION_SAMPLES, plain_samples=CALIBRATION_PLAIN_SAMPLES
    )


# Called with how much is done, and of how much.
Progress = Callable[[int, int], None]
# Starts a stream on a prompt with a policy of its own.
Start = Callable[[list[int], DraftLengthPolicy], "Stream"]
CostTable = dict[int, dict[int, float]]


def part_of(progress: Progress | None, number: int, parts: int) -> Progress:
    """Return what reports the progress of one of several equal parts."""

    def report(done: int, total: int) -> None:
        if progress is not None:
            progress(number * total + done, parts * total)

    return report


def follow_calibration(start: Start, contexts: SequenceOf[int]) -> CostTable:
    """Run the rounds of a calibration on a rank that does not decide their lengths."""
    for context in sorted(contexts):
        for _ in start(calibration_prompt(context), NotingParts(FixedDraftLength(0))):
            pass  # to where rank 0 ends it
    return {}


class PolicyFactory:
    """Makes a policy for each stream.

    `usual` is the length of streams that name none, None an adaptive one, and `early`
    says whether drafts of that may end early, see `engine.drafters.early_stop`. A
    `shape` of exact mode limits drafts, and has costs of its own.

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
        early: bool = True,
        shape: FixedShape | None = None,
    ) -> None:
        self.usual = _checked(usual, "draft_length")
        self._model, self._draft, self._sliding = model, draft, sliding
        self._compiled, self._shape = compiled, shape
        self.longest = LONGEST if shape is None else min(LONGEST, shape.rows - 1)
        self._each = members_of(draft)
        self._known: dict[int, Known] = {}
        self._batches: dict[int, Known] = {}
        self._allowances = [Allowance() for _ in self._each]
        self._certainties = [
            Certainties() if early and each.ends_early else None for each in self._each
        ]
        self._batch_allowance = Allowance()

    def for_stream(
        self,
        length: int | DraftLengthPolicy | None,
        most: int | None = None,
        *,
        greedy: bool = False,
    ) -> DraftLengthPolicy:
        """Return the policy of a stream.

        Args:
            length: None: the usual one.
            most: no draft is longer; None: than the policy says.
            greedy: whether its tokens are chosen without chance. On a CPU, where the
                host waits for a step for next to nothing, drafts then end early.

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
        early = greedy and on_cpu()
        policies = [
            self._policy(index, longest, early=early)
            for index in range(len(self._each))
        ]
        if len(policies) == 1:
            return policies[0]
        for policy in policies:  # what no calibration has measured of them
            policy.costs.guess(policies[self._calibrated].costs)
        return CascadeDraftLength(policies)

    def _policy(self, drafter: int, longest: int, *, early: bool) -> AdaptiveLengths:
        """Return the policy of a stream's drafter."""
        known = self._read(drafter)
        return AdaptiveLengths(
            known.costs,
            known.rates,
            longest,
            at_end=known.save_if_new,
            allowance=self._allowances[drafter],
            certainties=self._certainties[drafter] if early else None,
        )

    def for_batch(self, rates: AcceptanceRates) -> AdaptiveLengths:
        """Return the policy of a batch, whose costs are `batch_costs` of its rows."""
        return AdaptiveLengths(
            RoundCosts(),
            rates,
            self.longest,
            few=True,
            at_end=self._save_batches,
            allowance=self._batch_allowance,
        )

    def batch_costs(self, rows: int, rates: AcceptanceRates) -> RoundCosts:
        """Return what the rounds of batches with so many rows cost.

        What is not known of so many rows is guessed from the next larger batch that
        has measured it, which errs to shorter drafts, or else from the next smaller.
        Rates that know nothing are set to those that were kept.
        """
        known = self._batch(rows)
        others = sorted(self._batches)
        larger = [other for other in others if other > rows]
        smaller = [other for other in others if other < rows]
        for other in larger + smaller[::-1]:
            known.costs.guess(self._batches[other].costs)
        if rates.known == 0:
            rates.take(known.rates)
        known.rates = rates
        return known.costs

    def keep_batch(self, rows: int, measured: RoundCosts) -> CostTable:
        """Keep what a calibration has measured; return all that is known then."""
        known = self._batch(rows)
        known.costs.take(measured)
        known.save()
        return known.costs.table()

    def _batch(self, rows: int) -> Known:
        if rows not in self._batches:
            key = self._key(self._each)
            self._batches[rows] = Known.read(key and {**key, "rows": rows})
        return self._batches[rows]

    def _save_batches(self) -> None:
        for known in self._batches.values():
            known.save_if_new()

    @property
    def parts(self) -> PartsTable:
        """Where the time of calibrated rounds went."""
        return self._read(self._calibrated).parts

    def calibrate(
        self,
        start: Start,
        contexts: SequenceOf[int],
        progress: Progress | None = None,
    ) -> dict[int, dict[int, float]]:
        """Measure every length at these contexts, see the generator's `calibrate`."""
        self.check_calibration(contexts)
        known = self._read(self._calibrated)
        for number, context in enumerate(sorted(contexts)):
            report = part_of(progress, number, len(contexts))
            # Costs of its own: a new bucket would begin with what the last one knows.
            fresh = calibration_costs()
            known.parts |= self._measure(start, context, fresh, report)
            known.costs.take(fresh)
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

    def _measure(
        self, start: Start, context: int, fresh: RoundCosts, report: Progress
    ) -> PartsTable:
        """Run rounds until every length was measured; return their parts."""
        policy = AdaptiveLengths(fresh, AcceptanceRates(), self.longest, thorough=True)
        rounds = 0
        noting = NotingParts(policy, context)
        with start(calibration_prompt(context), noting) as stream:
            for _ in stream:
                done = stream.stats.rounds
                if done > rounds and policy.measured(context):
                    break
                rounds = done
                report(*policy.progress(context))
                if rounds > MOST_ROUNDS:
                    break
        return noting.table()

    @property
    def _calibrated(self) -> int:
        """The drafter whose rounds a calibration measures, see `measured_draft`."""
        each = enumerate(self._each)
        return next((index for index, one in each if one.measurable), 0)

    def _read(self, drafter: int) -> Known:
        if drafter not in self._known:
            self._known[drafter] = Known.read(
                self._key(self._each[drafter : drafter + 1])
            )
        return self._known[drafter]

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

"""Measures the costs of a batch's rounds before there are requests.

Rows with the same prompt run together until every draft length was measured. Their
texts do not matter: the cost of a round depends on the number of rows, the draft length
and the context.
"""

from collections.abc import Callable, Sequence

from mlx_speculation.engine.batch.request import (
    BatchRequest,
    StreamSource,
    reason_alone,
)
from mlx_speculation.engine.batch.results import BatchStatistics
from mlx_speculation.engine.batch.running import RunningTogether
from mlx_speculation.engine.draft_length.base import DraftLengthPolicy
from mlx_speculation.engine.draft_length.calibration import (
    Calibration,
    Progress,
    calibration_prompt,
    part_of,
)
from mlx_speculation.engine.draft_length.costs import CostTable
from mlx_speculation.engine.stream import Stream
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import PrefillBudget, RowSizes

StartStream = Callable[[list[int], DraftLengthPolicy], Stream]


def calibrate_batches(
    generator: StreamSource,
    start: StartStream,
    rows: Sequence[int],
    contexts: Sequence[int],
    progress: Progress | None = None,
) -> dict[int, CostTable]:
    """Measure all draft lengths; see `SpeculativeGenerator.calibrate_batches`."""
    lengths = generator.lengths
    lengths.check_calibration(contexts)
    if generator.ranks > 1:
        raise InvalidRequestError(
            f"Rounds of a batch were to be measured, and the target is on "
            f"{generator.ranks} ranks, which generate one text at a time. Use "
            "calibrate()."
        )
    if not rows or any(count < 1 for count in rows):
        raise InvalidRequestError(
            f"rows is {list(rows)}, and at least one number of rows from 1 is needed."
        )
    cases = [(count, n) for count in sorted(set(rows)) for n in sorted(contexts)]
    result: dict[int, CostTable] = {}
    for number, (count, context) in enumerate(cases):
        report = part_of(progress, number, len(cases))
        policy = Calibration(context, lengths.longest)
        kept_as = _measure(generator, start, policy, (count, context), report)
        result[kept_as] = lengths.calibrated(kept_as).take(policy)
    return result


def _measure(
    generator: StreamSource,
    start: StartStream,
    policy: Calibration,
    what: tuple[int, int],
    report: Progress,
) -> int:
    """Run the rounds of `what`, a number of rows and a context.

    Returns:
        The key of the measured costs: `count` rounded up to a power of two.

    Raises:
        Exception: the error that ended a row.
    """
    count, context = what
    model, lengths = generator.model, generator.lengths.for_batch()
    decoder = RunningTogether(model, lengths, BatchStatistics(), RowSizes())
    prompt = calibration_prompt(context)
    streams = [start(prompt, policy) for _ in range(count)]
    rows = [BatchRequest(uid, stream) for uid, stream in enumerate(streams)]
    alone = reason_alone(streams[0], model, {})
    if alone is not None:
        raise InvalidRequestError(
            f"Rounds of {count} rows were to be measured, and rows of this target run "
            f"alone: {alone}. Use calibrate(), which measures rows that run alone."
        )
    try:
        for row in rows:
            row.begin(PrefillBudget(len(prompt)).fits)
        decoder.join(rows)
        while policy.done < policy.rounds:
            decoder.next_round()
            if len(decoder.rows) < count:
                raise next(row.error for row in rows if row.error is not None)
            report(policy.done, policy.rounds)
    finally:
        for row in rows:
            if not row.ended:
                decoder.leave([row])
                row.stream.close()
            row.let_go()
    return lengths.bucket

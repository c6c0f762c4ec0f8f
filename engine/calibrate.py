"""Measures the costs of rounds of streams and batches, before there are requests.

A stream, or a batch whose rows all have the same prompt, runs until each draft length
was measured. The texts do not matter.
"""

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter

from mlx_speculation.engine.batch.request import (
    BatchRequest,
    StreamSource,
    reason_alone,
)
from mlx_speculation.engine.batch.results import BatchStatistics
from mlx_speculation.engine.batch.running import RunningTogether
from mlx_speculation.engine.draft_length.base import DraftLengthPolicy, FixedDraftLength
from mlx_speculation.engine.draft_length.calibration import (
    Calibration,
    calibration_prompt,
    most_tokens,
)
from mlx_speculation.engine.draft_length.costs import CostTable
from mlx_speculation.engine.stream import Stream
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import (
    PART_SIZES,
    PrefillBudget,
    RowSizes,
    position_table,
    usual_part,
)

StartStream = Callable[[list[int], DraftLengthPolicy], Stream]
# Called with the numbers of finished rounds and of all rounds, for each case anew.
Progress = Callable[[int, int], None]

# A part is the layers that a forward submits at once. In order: the number of rounds
# that are measured with each part size; the draft length of these rounds; the share of
# a round's time that a part size has to save to replace the usual part size.
PART_ROUNDS, PART_DRAFT, PART_GAIN = 5, 4, 0.05


def calibrate(
    generator: StreamSource,
    start: StartStream,
    contexts: Sequence[int],
    progress: Progress | None = None,
) -> CostTable:
    """Measure all draft lengths; see `SpeculativeGenerator.calibrate`."""
    _check(generator, contexts)
    if generator.ranks == 1 and generator.exact is None:
        generator.lengths.calibrated().part = measure_part(start, min(contexts))
    cases = [(0, context) for context in sorted(contexts)]
    return _measured(generator, start, cases, progress)[0]


def follow(start: StartStream, contexts: Sequence[int], longest: int) -> None:
    """Run the rounds of a calibration on a rank that does not decide their lengths."""
    for context in sorted(contexts):
        # Only rank 0's policy is used, but all ranks must have policies of one class.
        policy = Calibration(context, longest)
        for _ in start(policy.prompt, policy):
            pass  # until rank 0 ends it


def calibrate_batches(
    generator: StreamSource,
    start: StartStream,
    rows: Sequence[int],
    contexts: Sequence[int],
    progress: Progress | None = None,
) -> dict[int, CostTable]:
    """Measure all draft lengths; see `SpeculativeGenerator.calibrate_batches`."""
    _check(generator, contexts)
    if generator.ranks > 1:
        raise InvalidRequestError(
            f"Rounds of a batch cannot be measured on the {generator.ranks} ranks of "
            "this target, which generate one text at a time. Use calibrate()."
        )
    if not rows or any(count < 1 for count in rows):
        raise InvalidRequestError(
            f"rows is {list(rows)}; at least one number is needed, and each must be 1 "
            "or more."
        )
    cases = [(count, n) for count in sorted(set(rows)) for n in sorted(contexts)]
    return _measured(generator, start, cases, progress)


def _check(generator: StreamSource, contexts: Sequence[int]) -> None:
    if generator.draft is None:
        raise InvalidRequestError(
            "The generator has no draft, so there is nothing to calibrate. Pass "
            "one as draft=..."
        )
    if not contexts or any(context < 1 for context in contexts):
        raise InvalidRequestError(
            f"contexts is {list(contexts)}; at least one number of tokens is needed, "
            "and each must be 1 or more."
        )
    positions = position_table(generator.model)
    tokens = most_tokens(generator.lengths.longest)
    if positions is not None and max(contexts) + tokens > positions:
        raise InvalidRequestError(
            f"A calibration may write {tokens} tokens after a context of "
            f"{max(contexts)} tokens, but the target has only {positions} "
            f"positions. Measure at {max(0, positions - tokens)} tokens at most."
        )


def _measured(
    generator: StreamSource,
    start: StartStream,
    cases: Sequence[tuple[int, int]],
    progress: Progress | None,
) -> dict[int, CostTable]:
    """Measure and store each case: a number of rows (0: a stream) and a context."""
    result: dict[int, CostTable] = {}
    for count, context in cases:
        policy = Calibration(context, generator.lengths.longest)

        def report(policy: Calibration = policy) -> bool:
            done, total = min(policy.done, policy.rounds), policy.rounds
            if progress is not None:
                progress(done, total)
            return done < total

        if count:
            kept_as = _run_batch(generator, start, policy, count, report)
        else:
            kept_as = 0
            with start(policy.prompt, policy) as stream:
                for _ in stream:
                    if not report():
                        break
        source = generator.lengths.calibrated(kept_as)
        result[kept_as] = source.take(policy.measured)
    return result


def _run_batch(
    generator: StreamSource,
    start: StartStream,
    policy: Calibration,
    count: int,
    report: Callable[[], bool],
) -> int:
    """Run a calibration with `count` rows; return the key under which to keep costs."""
    model, lengths = generator.model, generator.lengths.for_batch()
    decoder = RunningTogether(model, lengths, BatchStatistics(), RowSizes())
    streams = [start(policy.prompt, policy) for _ in range(count)]
    rows = [BatchRequest(uid, stream) for uid, stream in enumerate(streams)]
    alone = reason_alone(streams[0], model, {})
    if alone is not None:
        raise InvalidRequestError(
            f"Rounds of {count} rows cannot be measured, because each row runs alone: "
            f"{alone}. Use calibrate(), which measures rows that run alone."
        )
    try:
        for row in rows:
            row.begin(PrefillBudget(len(policy.prompt)).fits)
        decoder.join(rows)
        while report():
            decoder.next_round()
            if len(decoder.rows) < count:
                raise next(row.error for row in rows if row.error is not None)
    finally:
        for row in rows:
            if not row.ended:
                decoder.leave([row])
                row.stream.close()
            row.let_go()
    return lengths.bucket


def measure_part(start: StartStream, context: int) -> int:
    """Return how many layers a forward submits at once when it is fastest; 0: all."""
    seconds: dict[int, list[float]] = {size: [] for size in PART_SIZES}
    with start(calibration_prompt(context), FixedDraftLength(PART_DRAFT)) as stream:
        stream.next_round()  # reads the prompt
        for size in PART_SIZES * PART_ROUNDS:
            stream.request.target.part = size
            started = perf_counter()
            stream.next_round()
            seconds[size].append(perf_counter() - started)
    usual = usual_part()
    medians = {size: median(each) for size, each in seconds.items()}
    best = min(medians, key=medians.__getitem__)
    return best if medians[best] < (1 - PART_GAIN) * medians[usual] else usual

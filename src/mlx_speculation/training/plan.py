"""Plan of a training that fits into its minutes.

Optimizer steps and a few tokens of dialogues are timed on made-up text before any file
is written. Each phase has a share of the minutes, and sizes are reduced until it fits.
If even the smallest training does not fit, the error names the minutes that it needs.

    phase       share        what has to fit into the share
    dialogues   DATA         the held-out dialogues and one batch to learn from
    steps       STEPS        LEAST_STEPS steps; at the smallest size, one step
    evaluation  EVALUATION   one evaluation
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import mlx.nn as nn
import numpy as np

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.training.data.answers import write_answers
from mlx_speculation.training.data.dialogues import Dialogue
from mlx_speculation.training.data.row_batches import RowBatches
from mlx_speculation.training.options import TrainOptions

DATA, STEPS, EVALUATION = 0.35, 0.4, 0.06
LEAST_STEPS = 50
TRIAL = 0.05  # the share of the time that the next larger timed step may take
SIZED = ("batch", "held_out", "answer_tokens", "rows", "slots", "accumulate")
LEAST_DIALOGUES = 8  # in a reduced batch, and held out
_SHORTEST = 32  # answers are not reduced to fewer tokens
_NARROWEST = 64  # rows are not reduced to fewer slots
_FORWARD = 0.4  # time of a position in an evaluation, relative to a step

# Shares of the minutes after timing. A batch of dialogues that would end after
# DATA_SHARE is not begun; at DATA_END, answers that are being written are cut; by
# STEPS_END, the last evaluation must be complete.
DATA_SHARE, DATA_END, STEPS_END = 0.4, 0.5, 0.88
_STEP_SHARE = 0.75  # of the remaining time goes to steps, the rest to evaluations
_MOST_EVALUATIONS = 5  # of a training with limited minutes

# Returns the seconds of an optimizer step over (rows, slots).
TimeStep = Callable[[int, int], float]


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured times, in seconds."""

    position: float  # of a step, per slot
    token: float  # to write one token of a single dialogue
    tokens: float  # to write one token of each of `batch` dialogues
    batch: int

    def batch_token(self, batch: int) -> float:
        """Return the seconds to write one token of each of `batch` dialogues."""
        if self.batch == 1:
            return self.tokens * batch
        share = (batch - 1) / (self.batch - 1)
        return self.token + max(0.0, self.tokens - self.token) * share


@dataclass(slots=True)
class Schedule:
    """The minutes of a training, and the shares of its phases."""

    minutes: float | None  # None: no limit
    began: float  # a time of `time.monotonic`
    rates: Rates | None = None  # None: nothing was timed, or the training is resumed
    spent: float = 0.0  # seconds from `began` to the end of timing

    def fit(self, options: TrainOptions, rates: Rates) -> TrainOptions:
        """Store the rates, and return options that fit into the time.

        Raises:
            InvalidRequestError: the minutes are too few for any training.
        """
        assert self.minutes is not None
        self.rates, self.spent = rates, time.monotonic() - self.began
        return sized(options, rates, 60 * self.minutes - self.spent, self.spent)

    def deadline(self, share: float = 1.0) -> float | None:
        """Return the end of a share of the minutes after timing; None: no limit."""
        if self.minutes is None:
            return None
        return self.began + self.spent + (60 * self.minutes - self.spent) * share

    def is_over(self, share: float) -> bool:
        """Return whether a share of the minutes has ended."""
        until = self.deadline(share)
        return until is not None and time.monotonic() > until

    def running_out(self, share: float) -> Callable[[], bool]:
        """Return a function to call after each batch: is there no time for another?"""
        last = time.monotonic()

        def stop() -> bool:
            nonlocal last
            now = time.monotonic()
            took, last = now - last, now
            until = self.deadline(share)
            return until is not None and now + took > until

        return stop

    def steps(self, seconds: float) -> int:
        """Return the number of steps that fit, at least 1; a step takes `seconds`."""
        end = self.deadline(STEPS_END)
        assert end is not None
        return max(1, int(_STEP_SHARE * (end - time.monotonic()) / seconds))

    def evaluations(self, options: TrainOptions) -> int:
        """Return the number of evaluations."""
        wanted = options.evaluations
        return wanted if self.rates is None else min(wanted, _MOST_EVALUATIONS)

    def evaluated(
        self, options: TrainOptions, held_out: Sequence[Dialogue]
    ) -> list[Dialogue]:
        """Return as many held-out dialogues, half of them greedy, as fit the time."""
        chosen = list(held_out[: options.held_out])
        if self.rates is None or self.minutes is None:
            return chosen
        count = evaluated(options, self.rates, 60 * self.minutes)
        greedy = [each for each in chosen if not each.temperature]
        sampled = [each for each in chosen if each.temperature]
        return [*greedy[: -(-count // 2)], *sampled[: max(1, count // 2)]]


def sized(
    options: TrainOptions, rates: Rates, seconds: float, spent: float = 0.0
) -> TrainOptions:
    """Return options of a training that fits into `seconds`.

    Args:
        options: the requested options.
        rates: measured on this machine.
        seconds: the remaining time.
        spent: seconds that loading, compiling and timing have taken.

    Raises:
        InvalidRequestError: not one step fits; names the minutes that are needed.
    """
    data = _sized_data(options, rates, DATA * seconds)
    step = _sized_step(options, rates, STEPS * seconds)
    if data is None or step is None:
        least = replace(
            options, rows=1, accumulate=1, slots=min(options.slots, _NARROWEST)
        )
        shortest = replace(
            options,
            batch=min(LEAST_DIALOGUES, options.batch),
            held_out=min(LEAST_DIALOGUES, options.held_out),
            answer_tokens=min(_SHORTEST, options.answer_tokens),
        )
        needed = max(
            step_seconds(least, rates) / STEPS, data_seconds(shortest, rates) / DATA
        )
        raise InvalidRequestError(
            f"Of {(seconds + spent) / 60:.1f} minutes {max(0.0, seconds):.0f} s are "
            f"left after {spent:.0f} s of loading, compiling and timing, and not one "
            f"step fits: the smallest takes about {step_seconds(least, rates):.0f} s "
            f"here, and its dialogues {data_seconds(shortest, rates):.0f} s. Pass "
            f"--minutes {-(-(needed + spent) // 60):.0f} or more, or train on a faster "
            "machine."
        )
    return replace(
        options,
        batch=data.batch,
        held_out=data.held_out,
        answer_tokens=data.answer_tokens,
        rows=step.rows,
        slots=step.slots,
        accumulate=step.accumulate,
    )


def data_seconds(options: TrainOptions, rates: Rates) -> float:
    """Return the seconds for the held-out dialogues and one batch to learn from."""
    half = -(-options.held_out // 2)
    batches = [min(options.batch, half)] * (2 * -(-half // options.batch))
    length = options.answer_tokens + options.prompt_tokens * (options.own_share > 0)
    return sum(length * rates.batch_token(n) for n in (*batches, options.batch))


def step_seconds(options: TrainOptions, rates: Rates) -> float:
    """Return the seconds of an optimizer step."""
    return options.rows * options.slots * options.accumulate * rates.position


def evaluated(options: TrainOptions, rates: Rates, seconds: float) -> int:
    """Return the number of held-out dialogues that fit an evaluation, at least 8."""
    length = options.answer_tokens + options.prompt_tokens
    each = _FORWARD * rates.position * length
    return min(options.held_out, max(LEAST_DIALOGUES, int(EVALUATION * seconds / each)))


def _sized_data(
    options: TrainOptions, rates: Rates, seconds: float
) -> TrainOptions | None:
    least = LEAST_DIALOGUES
    while data_seconds(options, rates) > seconds:
        if options.held_out > max(least, 2 * options.batch):
            options = replace(options, held_out=max(least, options.held_out // 2))
        elif options.batch > least:
            batch = max(least, options.batch // 2)
            held_out = min(options.held_out, 2 * batch)
            options = replace(options, batch=batch, held_out=held_out)
        elif options.answer_tokens > _SHORTEST:
            most = max(_SHORTEST, options.answer_tokens // 2)
            options = replace(options, answer_tokens=most)
        else:
            return None
    return options


def _sized_step(
    options: TrainOptions, rates: Rates, seconds: float
) -> TrainOptions | None:
    if options.steps is not None:
        return options
    while LEAST_STEPS * step_seconds(options, rates) > seconds:
        if options.accumulate > 1:
            options = replace(options, accumulate=options.accumulate // 2)
        elif options.rows > 1:
            options = replace(options, rows=options.rows // 2)
        elif options.slots > _NARROWEST:
            options = replace(options, slots=max(_NARROWEST, options.slots // 2))
        elif step_seconds(options, rates) <= seconds:
            break
        else:
            return None
    return options


def position_seconds(run: TimeStep, rows: int, slots: int, most: float) -> float:
    """Return the seconds of a step per slot, timed with steps of growing size.

    Args:
        run: times a step.
        rows: rows of the full step.
        slots: slots of each row of the full step.
        most: seconds. Timing ends if the next step would take longer than this, or if
            all steps so far have, as they may include the compilation of new shapes.
    """
    began = time.monotonic()
    shape = (1, min(slots, 2 * _NARROWEST))
    while True:
        each = run(*shape) / (shape[0] * shape[1])
        if shape == (rows, slots):
            return each
        longer = (shape[0], min(slots, 4 * shape[1]))
        shape = longer if longer != shape else (min(rows, 4 * shape[0]), slots)
        taken = max(each * shape[0] * shape[1], time.monotonic() - began)
        if taken > most:
            return each


def rates_of(model: nn.Module, position: float, batch: int) -> Rates:
    """Return the rates: that of a position as given, those of tokens timed here."""
    one, many = (token_seconds(model, count) for count in (1, batch))
    return Rates(position, one, many, batch)


def changed(options: TrainOptions, other: TrainOptions) -> dict[str, int]:
    """Return the sizes of `other` that differ from those of `options`, by name."""
    return {
        name: getattr(other, name)
        for name in SIZED
        if getattr(other, name) != getattr(options, name)
    }


def token_seconds(model: nn.Module, batch: int) -> float:
    """Return the seconds to write one token of each of `batch` dialogues."""
    prompts = [[number % 7 + 1] * 4 for number in range(batch)]
    taken = []
    for most in (2, 8):  # the first call compiles kernels
        began = time.monotonic()
        write_answers(model, prompts, most=most, temperature=0.8, ends=[], seed=0)
        taken.append((time.monotonic() - began) / most)
    return taken[-1]


def made_up_batches(
    width: int, rows: int, slots: int, more: int, anchors: int | None, first: int
) -> RowBatches:
    """Return batches of random text, to time the steps of a shape."""
    count = rows * slots + more + 1
    tokens = np.random.default_rng(0).integers(0, width, count).astype(np.uint32)
    text = Dialogue(tokens, np.ones(count, np.bool_), False, True, 0.8)
    few = None if anchors is None else min(anchors, slots)
    return RowBatches([text], rows, slots, more, 0, few, first)

"""Plan of a training that fits into a given number of minutes.

Optimizer steps and a few tokens of dialogues are timed on made-up text before any file
is written. Each phase has a share of the minutes; options are reduced until the phases
fit into their shares.

    phase       share        what has to fit into the share
    dialogues   DATA         the held-out dialogues and one batch to learn from
    steps       STEPS        LEAST_STEPS steps; of the smallest size, one is enough
    evaluation  EVALUATION   one evaluation
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.nn as nn
import numpy as np

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.training.data.answers import write_answers
from mlx_speculation.training.data.dialogues import Dialogue
from mlx_speculation.training.options import TrainOptions

DATA, STEPS, EVALUATION = 0.35, 0.4, 0.06
LEAST_STEPS = 50
TRIAL = 0.05  # share of the minutes that the next larger timed step may take
LEAST_DIALOGUES = 8  # minimum of a reduced batch, and of held-out dialogues
_NARROWEST = 64  # rows are not reduced to fewer slots
_DATA_SIZES = ("held_out", "batch", "answer_tokens")  # in the order of reduction
_STEP_SIZES = ("accumulate", "rows", "slots")
_LEAST = {
    "batch": LEAST_DIALOGUES,
    "answer_tokens": 32,
    "accumulate": 1,
    "rows": 1,
    "slots": _NARROWEST,
}
_FORWARD = 0.4  # seconds per position of an evaluation, relative to training

# Shares of the minutes after timing. No batch of dialogues begins that would end after
# DATA_SHARE. Unfinished answers are cut at DATA_END. The last evaluation must end by
# STEPS_END.
DATA_SHARE, DATA_END, STEPS_END = 0.4, 0.5, 0.88
_STEP_SHARE = 0.75  # share of the remaining time for steps; the rest: evaluations
_MOST_EVALUATIONS = 5  # of a training with limited minutes

Sizes = dict[str, Any]  # options by name


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

    def fit(self, options: TrainOptions, rates: Rates) -> Sizes:
        """Store the rates; return smaller values of options, see `sized`."""
        assert self.minutes is not None
        self.rates, self.spent = rates, time.monotonic() - self.began
        return sized(options, rates, 60 * self.minutes - self.spent, self.spent)

    def deadline(self, share: float = 1.0) -> float | None:
        """Return the time at which a share of the minutes after timing is used up.

        It is a time of `time.monotonic`. None: the minutes have no limit.
        """
        if self.minutes is None:
            return None
        return self.began + self.spent + (60 * self.minutes - self.spent) * share

    def is_over(self, share: float, more: float = 0.0) -> bool:
        """Return whether a share of the minutes ends within `more` seconds from now."""
        until = self.deadline(share)
        return until is not None and time.monotonic() + more > until

    def running_out(self, share: float) -> Callable[[], bool]:
        """Return a function to call between batches; it returns whether to stop."""
        last = time.monotonic()

        def stop() -> bool:
            nonlocal last
            before, last = last, time.monotonic()
            return self.is_over(share, last - before)

        return stop

    def steps(self, seconds: float) -> int:
        """Return the number of steps of `seconds` each that fit, at least 1."""
        end = self.deadline(STEPS_END)
        assert end is not None
        return max(1, int(_STEP_SHARE * (end - time.monotonic()) / seconds))

    def evaluations(self, options: TrainOptions) -> int:
        """Return the number of evaluations, at most a few if the time is limited."""
        wanted = options.evaluations
        return wanted if self.rates is None else min(wanted, _MOST_EVALUATIONS)

    def evaluated(
        self, options: TrainOptions, held_out: Sequence[Dialogue]
    ) -> list[Dialogue]:
        """Return the held-out dialogues, half of them greedy, that the time allows."""
        chosen = list(held_out[: options.held_out])
        if self.rates is None or self.minutes is None:
            return chosen
        each = _FORWARD * self.rates.position
        each *= options.answer_tokens + options.prompt_tokens
        count = max(LEAST_DIALOGUES, int(EVALUATION * 60 * self.minutes / each))
        greedy = [one for one in chosen if not one.temperature]
        sampled = [one for one in chosen if one.temperature]
        return [*greedy[: -(-count // 2)], *sampled[: max(1, count // 2)]]


def sized(
    options: TrainOptions, rates: Rates, seconds: float, spent: float = 0.0
) -> Sizes:
    """Return smaller values of options, so that the training fits into `seconds`.

    `spent`: seconds that loading, compiling and timing have taken.

    Raises:
        InvalidRequestError: not one step fits; the message names the minutes needed.
    """
    small = _reduced(
        options, _DATA_SIZES, lambda now: data_seconds(now, rates) > DATA * seconds
    )
    takes = 0.0
    if options.steps is None:
        small = _reduced(
            small,
            _STEP_SIZES,
            lambda now: LEAST_STEPS * step_seconds(now, rates) > STEPS * seconds,
        )
        takes = step_seconds(small, rates)
    if takes <= STEPS * seconds and data_seconds(small, rates) <= DATA * seconds:
        sizes = {name: getattr(small, name) for name in (*_DATA_SIZES, *_STEP_SIZES)}
        return {n: size for n, size in sizes.items() if size != getattr(options, n)}
    least = _reduced(options, (*_DATA_SIZES, *_STEP_SIZES), lambda _: True)
    step, data = step_seconds(least, rates), data_seconds(least, rates)
    needed = max(step / STEPS, data / DATA) + spent
    raise InvalidRequestError(
        f"Of {(seconds + spent) / 60:.1f} minutes {max(0.0, seconds):.0f} s are "
        f"left after {spent:.0f} s of loading, compiling and timing, and not one "
        f"step fits: the smallest takes about {step:.0f} s here, and its dialogues "
        f"{data:.0f} s. Pass --minutes {-(-needed // 60):.0f} or more, or train on a "
        "faster machine."
    )


def _reduced(
    options: TrainOptions,
    names: Sequence[str],
    takes_long: Callable[[TrainOptions], bool],
) -> TrainOptions:
    """Halve the options `names`, in this order, until `takes_long` is false."""
    while takes_long(options):
        # The held-out dialogues stay at two full batches or more: two smaller batches
        # would take almost as long.
        least = _LEAST | {"held_out": max(LEAST_DIALOGUES, 2 * options.batch)}
        name = next((n for n in names if getattr(options, n) > least[n]), None)
        if name is None:
            break
        half: Sizes = {name: max(least[name], getattr(options, name) // 2)}
        options = replace(options, **half)
    return options


def data_seconds(options: TrainOptions, rates: Rates) -> float:
    """Return the seconds for the held-out dialogues and one batch to learn from."""
    half = -(-options.held_out // 2)
    batches = [min(options.batch, half)] * (2 * -(-half // options.batch))
    length = options.answer_tokens + options.prompt_tokens * (options.own_share > 0)
    return sum(length * rates.batch_token(n) for n in (*batches, options.batch))


def step_seconds(options: TrainOptions, rates: Rates) -> float:
    """Return the seconds of an optimizer step."""
    return options.rows * options.slots * options.accumulate * rates.position


def position_seconds(
    run: Callable[[int, int], float], rows: int, slots: int, most: float
) -> float:
    """Return the seconds per slot of a step, timed with steps of growing size.

    `run` returns the seconds of a step. Timing ends after a step of `rows` and `slots`,
    or when the next step or all steps so far take more than `most` seconds.
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


def token_seconds(model: nn.Module, batch: int) -> float:
    """Return the seconds to write one token of each of `batch` dialogues."""
    prompts = [[number % 7 + 1] * 4 for number in range(batch)]
    taken = 0.0
    for most in (2, 8):  # the first call compiles kernels
        began = time.monotonic()
        write_answers(model, prompts, most=most, temperature=0.8, ends=[], seed=0)
        taken = (time.monotonic() - began) / most
    return taken


def made_up(width: int, count: int) -> Dialogue:
    """Return random text of `count` ids below `width`, for timing steps."""
    tokens = np.random.default_rng(0).integers(0, width, count).astype(np.uint32)
    return Dialogue(tokens, np.ones(count, np.bool_), False, True, 0.8)

"""Ways to decode one prompt, token by token.

An arm begins a job and returns a run, which is timed slice by slice. The first slice is
the prefill and the first token. The speed includes only tokens of later rounds.
"""

import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import mlx.core as mx
from mlx_lm.generate import generate_step, generation_stream, speculative_generate_step
from mlx_lm.sample_utils import make_sampler

from bench.models import Bench
from bench.turns import order
from mlx_speculation import Sampling, SpeculativeGenerator
from mlx_speculation.engine import Statistics
from mlx_speculation.models import wired

SLICE = 16  # tokens that an arm generates in a turn
GREEDY = Sampling(seed=0)

# Tokens as they arrive, each with the number of its round.
Arrivals = Generator[tuple[int, int], None, None]


@dataclass(frozen=True, slots=True)
class Job:
    """Task of an arm."""

    prompt: list[int]  # token ids
    tokens: int  # the largest number of tokens to generate
    sampling: Sampling = GREEDY
    stop: frozenset[int] = frozenset()  # tokens that end the text, and are part of it


@dataclass(slots=True)
class Run:
    """Text that an arm has generated so far, and its times."""

    arrivals: Arrivals  # the tokens to come
    stop: frozenset[int]
    statistics: Statistics
    tokens: list[int] = field(default_factory=list)
    first_seconds: float = 0.0  # to the first token, prefill included
    # Timed tokens and seconds of each later slice
    slices: list[tuple[int, float]] = field(default_factory=list)
    ended: bool = False
    failure: str | None = None  # the error that mlx-lm raised
    _untimed: int = -1  # number of the round that emitted the first token

    @property
    def timed(self) -> int:
        """Number of tokens in `slices`, without those of the first token's round."""
        return sum(count for count, _ in self.slices)

    @property
    def seconds(self) -> float:
        """Sum of the seconds of the timed slices."""
        return sum(seconds for _, seconds in self.slices)

    def take(self) -> None:
        """Take a slice of tokens, with nothing in flight before and after."""
        first, timed, arrived, started = not self.tokens, 0, 0, time.perf_counter()
        number, wanted = -1, 1 if first else SLICE
        try:
            for token, number in islice(self.arrivals, wanted):
                self.tokens.append(token)
                arrived += 1
                timed += number != self._untimed
                if token in self.stop:
                    self.arrivals.close()
        except Exception as error:  # a failure of mlx-lm is a result
            when = f"failed after {len(self.tokens)} tokens" if arrived else "refused"
            self.failure = f"{when}: {type(error).__name__}: {error}"
        settle()
        seconds = time.perf_counter() - started
        self.ended = arrived < wanted or self.tokens[-1] in self.stop
        if first:
            self.first_seconds, self._untimed = seconds, number
        elif arrived:
            self.slices.append((timed, seconds))


def settle() -> None:
    """Wait until nothing is in flight."""
    mx.synchronize()
    mx.synchronize(generation_stream)


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to decode."""

    name: str
    begin: Callable[[Job], Run]
    ours: bool = True  # its text has to equal plain decoding's at any temperature
    draft: str = ""  # name of the draft; "": plain decoding
    length: int | None = 0  # tokens drafted in a round; None: adaptive


def plain_arms(bench: Bench) -> list[Arm]:
    """Return the arms of plain decoding; the first is ours."""
    ours = Arm("ours plain", partial(begin_ours, bench.plain, 0))
    return [ours, Arm("mlx-lm plain", partial(_begin_mlx_lm, bench), ours=False)]


def drafted_arms(
    bench: Bench, drafts: list[str], lengths: list[int], **options: bool
) -> list[Arm]:
    """Return an arm for each draft and length, and an adaptive one for each draft."""
    arms = []
    for draft in drafts:
        generator = bench.generator(draft, **options)
        for length in (*lengths, None):
            words = "adaptive" if length is None else f"k={length}"
            begin = partial(begin_ours, generator, length)
            name = "+".join(part.rpartition("/")[2] for part in draft.split("+"))
            arms.append(Arm(f"{name} {words}", begin, draft=draft, length=length))
    return arms


def mlx_lm_arms(bench: Bench, lengths: list[int]) -> list[Arm]:
    """Return the arms of mlx-lm's own speculation with the draft model."""
    return [
        Arm(
            f"mlx-lm k={length}",
            partial(_begin_mlx_lm_speculative, bench, length),
            ours=False,
            draft="mlx-lm",
            length=length,
        )
        for length in lengths
    ]


def run_by_turns(bench: Bench, arms: list[Arm], job: Job) -> dict[str, Run]:
    """Let arms decode a job in turns of one slice of tokens."""
    with wired(bench.model):  # so the limit stays the same, whichever arm ends first
        settle()
        runs = {arm.name: arm.begin(job) for arm in arms}
        number = 0
        while live := [run for run in runs.values() if not run.ended]:
            for run in order(live, number):
                run.take()
            number += 1
    return runs


def begin_ours(generator: SpeculativeGenerator, length: int | None, job: Job) -> Run:
    """Begin a job with one of our generators; `length` None: adaptive."""
    stream = generator.stream(
        job.prompt,
        max_tokens=job.tokens,
        sampling=job.sampling,
        stop_tokens=(),
        draft_length=length,
    )

    def arrivals() -> Arrivals:
        with stream:
            for chunk in stream:
                yield chunk.token, stream.stats.rounds

    return Run(arrivals(), job.stop, stream.stats)


def _begin_mlx_lm(bench: Bench, job: Job) -> Run:
    statistics = Statistics()

    def arrivals() -> Arrivals:
        mx.random.seed(job.sampling.seed or 0)
        steps = generate_step(
            mx.array(job.prompt),
            bench.bare,
            max_tokens=job.tokens,
            sampler=make_sampler(temp=job.sampling.temperature or 0.0),
        )
        with closing(steps):
            for token, _ in steps:
                statistics.count(drafted=0, accepted=0, emitted=1)
                yield int(token), statistics.rounds

    return Run(arrivals(), job.stop, statistics)


def _begin_mlx_lm_speculative(bench: Bench, length: int, job: Job) -> Run:
    statistics = Statistics()

    def arrivals() -> Arrivals:
        flags: list[bool] = []
        mx.random.seed(job.sampling.seed or 0)
        steps = speculative_generate_step(
            mx.array(job.prompt),
            bench.bare,
            bench.bare_draft,
            num_draft_tokens=length,
            max_tokens=job.tokens,
            sampler=make_sampler(temp=job.sampling.temperature or 0.0),
        )
        try:
            with closing(steps):
                for token, _, from_draft in steps:
                    flags.append(from_draft)
                    yield int(token), flags[:-1].count(False)
        finally:
            count_rounds(statistics, flags, length, job.tokens)

    return Run(arrivals(), job.stop, statistics)


def count_rounds(
    statistics: Statistics, flags: list[bool], length: int, tokens: int
) -> None:
    """Count mlx-lm's rounds from its flags, which are true for accepted draft tokens.

    A round ends with a token that was not drafted, or with the job's last token.
    """
    emitted = accepted = 0
    for index, from_draft in enumerate(flags):
        accepted += from_draft
        if not from_draft or index + 1 == len(flags):
            statistics.count(
                drafted=min(length, tokens - emitted),
                accepted=accepted,
                emitted=index + 1 - emitted,
            )
            emitted, accepted = index + 1, 0

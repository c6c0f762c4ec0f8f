"""The arms of the benchmark: four ways to decode with the same models.

Every arm takes a job and gives back a run, timed by the same rule: the clock starts
when the first round's tokens have arrived and stops when the last token has, and the
tokens that arrived in between are counted. So prefill is left out, and the first
round of a speculative arm gives it no tokens for nothing.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step, generation_stream, speculative_generate_step
from mlx_lm.sample_utils import make_sampler

from mlx_speculation import Sampling, SpeculativeGenerator, load
from mlx_speculation.demo import DemoPrompt
from mlx_speculation.engine import Statistics
from mlx_speculation.models import TokenIds, check_same_ids, logit_width, wired
from mlx_speculation.samplers import Chooser


@dataclass(frozen=True, slots=True)
class Job:
    """What an arm is to generate."""

    prompt: list[int]
    tokens: int
    temperature: float
    seed: int

    @property
    def sampling(self) -> Sampling:
        """How our own arms choose."""
        return Sampling(temperature=self.temperature, seed=self.seed)


@dataclass(slots=True)
class Run:
    """What an arm generated, and how long it took.

    Attributes:
        tokens: the generated token ids.
        begun: when it was asked for, on the clock of `time.perf_counter`.
        first_seconds: from then to the first token, prefill included.
        timed: how many of them arrived while the clock ran.
        seconds: what the clock showed at the last one.
        statistics: rounds, drafted and accepted tokens.
        failure: what another program raised, or None.
        reasons: seconds of rounds by the reason of their draft length, where that was
            asked for.
    """

    tokens: list[int] = field(default_factory=list)
    begun: float = field(default_factory=time.perf_counter)
    first_seconds: float = 0.0
    timed: int = 0
    seconds: float = 0.0
    statistics: Statistics = field(default_factory=Statistics)
    failure: str | None = None
    reasons: dict[str, float] = field(default_factory=dict)

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.timed / self.seconds

    def follow(self, arrivals: Iterator[tuple[int, int]]) -> "Run":
        """Take pairs of a token and the number of its round, against the clock."""
        started, first_round = 0.0, -1
        for token, number in arrivals:
            now = time.perf_counter()
            if not self.tokens:
                started, first_round = now, number
                self.first_seconds = now - self.begun
            self.tokens.append(token)
            self.timed += number != first_round
            self.seconds = now - started
        return self


@dataclass(frozen=True, slots=True)
class Models:
    """A target with its draft, in our generators and for mlx-lm's functions."""

    target: nn.Module
    draft: nn.Module
    plain: SpeculativeGenerator
    speculative: SpeculativeGenerator

    @classmethod
    def load(cls, target_path: Path | str, draft_path: Path | str) -> "Models":
        """Load both, and check that they share their token ids."""
        target, tokenizer = load(target_path)
        draft, draft_tokenizer = load(draft_path)
        check_same_ids(tokenizer, draft_tokenizer)
        return cls(
            target,
            draft,
            SpeculativeGenerator(target, tokenizer, draft=None),
            SpeculativeGenerator(target, tokenizer, draft=draft),
        )

    def encode(self, text: str) -> list[int]:
        """Encode a prompt."""
        return [int(token) for token in self.plain.tokenizer.encode(text)]

    def chooser(self, job: Job) -> Chooser:
        """Make what chooses a job's tokens in our arms."""
        ids = TokenIds.of(self.plain.tokenizer)
        return Chooser(
            job.sampling,
            ids.width,
            limit=logit_width(self.target),
            missing=ids.missing,
        )


def jobs_of(
    models: Models,
    texts: Sequence[DemoPrompt],
    tokens: int,
    temperature: float,
    seed: int,
) -> list[Job]:
    """Return a job for each text, with a seed of its own."""
    return [
        Job(models.encode(text.text), tokens, temperature, seed + index)
        for index, text in enumerate(texts)
    ]


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to decode.

    Attributes:
        engine: "ours" or "mlx-lm".
        draft_length: tokens drafted in a round; 0 is plain decoding.
        decode: runs a job.
        draft: what drafts, where it is not the draft model.
        auto: the length is chosen in each round, and this is the longest.
        tolerance: how much its logits may differ from those of our models.
    """

    engine: str
    draft_length: int
    decode: Callable[[Job], Run]
    draft: str = ""
    auto: bool = False
    tolerance: float = 0.0

    @property
    def name(self) -> str:
        """The arm in the tables."""
        length = f"k={self.draft_length}" if self.draft_length else "plain"
        words = [self.engine, self.draft, "auto" if self.auto else length]
        return " ".join(word for word in words if word)

    def is_comparable(self, temperature: float) -> bool:
        """Whether its text says anything beside that of our plain decoding.

        Above temperature 0 mlx-lm draws from the global generator.
        """
        return self.engine == "ours" or temperature == 0

    def must_be_equal(self, temperature: float) -> bool:
        """Whether another text than that of our plain decoding is an error of ours."""
        plain = not self.draft_length
        return self.is_comparable(temperature) and (self.engine == "ours" or plain)

    def run(self, job: Job) -> Run:
        """Run a job with nothing of other arms in flight."""
        mx.synchronize()
        mx.synchronize(generation_stream)
        return self.decode(job)


def plain_arms(models: Models) -> list[Arm]:
    """Make the arms of plain decoding; the first is ours."""
    return [
        Arm("ours", 0, partial(ours, models.plain, 0)),
        Arm("mlx-lm", 0, partial(_mlx_lm_plain, models)),
    ]


def mlx_lm_arms(models: Models, lengths: list[int]) -> list[Arm]:
    """Make the arms of mlx-lm's own speculation."""
    return [
        Arm("mlx-lm", length, partial(_mlx_lm_speculative, models, length))
        for length in lengths
    ]


def ours(
    generator: SpeculativeGenerator,
    length: int | None,
    job: Job,
    *,
    explain: bool = False,
) -> Run:
    """Run a job with one of our generators.

    Args:
        generator: with its draft.
        length: of the drafts; None: the generator's usual one.
        job: what to generate.
        explain: tell the reasons of the lengths, at the price of a hundredth.
    """
    run = Run()
    stream = generator.stream(
        job.prompt,
        max_tokens=job.tokens,
        sampling=job.sampling,
        stop_tokens=(),
        draft_length=length,
        explain=explain,
    )
    run.statistics = stream.stats
    run.follow((chunk.token, stream.stats.rounds) for chunk in stream)
    for plan, outcome in stream.decisions if explain else ():
        spent = run.reasons.get(plan.reason, 0.0)
        run.reasons[plan.reason] = spent + outcome.seconds
    return run


def _mlx_lm_plain(models: Models, job: Job) -> Run:
    run = Run()

    def arrivals(steps: Iterator[Any]) -> Iterator[tuple[int, int]]:
        for token, _ in steps:
            run.statistics.count(drafted=0, accepted=0, emitted=1)
            yield token, run.statistics.rounds

    mx.random.seed(job.seed)
    steps = generate_step(
        mx.array(job.prompt),
        models.target,
        max_tokens=job.tokens,
        sampler=make_sampler(temp=job.temperature),
    )
    with wired(models.target), closing(steps):
        return run.follow(arrivals(steps))


def _mlx_lm_speculative(models: Models, length: int, job: Job) -> Run:
    run = Run()
    mx.random.seed(job.seed)
    steps = speculative_generate_step(
        mx.array(job.prompt),
        models.target,
        models.draft,
        num_draft_tokens=length,
        max_tokens=job.tokens,
        sampler=make_sampler(temp=job.temperature),
    )
    flags: list[bool] = []

    def arrivals() -> Iterator[tuple[int, int]]:
        for token, _, from_draft in steps:
            yield int(token), flags.count(False)
            flags.append(from_draft)

    try:
        with wired(models.target), closing(steps):
            run.follow(arrivals())
    except Exception as error:  # What it cannot do is a result, whatever it raises.
        when = f"failed after token {len(run.tokens)}" if run.tokens else "refused"
        run.failure = f"{when}: {type(error).__name__}: {error}"
    count_rounds(run.statistics, flags, length, job.tokens)
    return run


def count_rounds(
    statistics: Statistics, flags: list[bool], length: int, tokens: int
) -> None:
    """Count mlx-lm's rounds from its flags: which tokens were drafted and accepted.

    A round ends with the one token that was not drafted, or with the budget.
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

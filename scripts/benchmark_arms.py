"""The arms of the benchmark: four ways to decode with the same models.

Every arm takes a job and gives back a run, timed by the same rule: the clock starts
when the first round's tokens have arrived and stops when the last token has, and the
tokens that arrived in between are counted. So prefill is left out, and the first
round of a speculative arm gives it no tokens for nothing. Where arms take turns, the
first slice is left out likewise, with all tokens of the round that ends it.
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from bare_models import bare
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


# Tokens as they arrive, each with the number of its round.
Arrivals = Generator[tuple[int, int], None, None]


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
        arrivals: the tokens that are still to come; None: it was run already.
        slices: where arms take turns, timed tokens and seconds of each slice.
    """

    tokens: list[int] = field(default_factory=list)
    begun: float = field(default_factory=time.perf_counter)
    first_seconds: float = 0.0
    timed: int = 0
    seconds: float = 0.0
    statistics: Statistics = field(default_factory=Statistics)
    failure: str | None = None
    reasons: dict[str, float] = field(default_factory=dict)
    arrivals: Arrivals | None = None
    slices: list[tuple[int, float]] = field(default_factory=list)
    _untimed: int = -1  # the round whose tokens came with the first

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.timed / self.seconds

    def follow(self, arrivals: Iterator[tuple[int, int]] | None = None) -> "Run":
        """Take all tokens against the clock; the first round starts it."""
        started = 0.0
        for token, number in arrivals or self.arrivals or ():
            now = self._note(token)
            if len(self.tokens) == 1:
                started, self._untimed = now, number
            self.timed += number != self._untimed
            self.seconds = now - started
        return self

    def take(self, count: int) -> None:
        """Take a slice of tokens, with nothing in flight before and after.

        The first slice is not timed, nor are tokens of the round that ends it.
        """
        if self.arrivals is None:
            raise ValueError("The run was run as a whole, and cannot take turns.")
        first, started = not self.tokens, time.perf_counter()
        self.begun = started if first else self.begun
        number, timed = -1, 0
        for token, number in islice(self.arrivals, count):
            self._note(token)
            timed += not first and number != self._untimed
        settle()
        if first:
            self._untimed = number
            return
        seconds = time.perf_counter() - started
        self.slices.append((timed, seconds))
        self.timed += timed
        self.seconds += seconds

    def _note(self, token: int) -> float:
        now = time.perf_counter()
        if not self.tokens:
            self.first_seconds = now - self.begun
        self.tokens.append(token)
        return now

    def finish(self) -> "Run":
        """Take what is left without the clock, and let go of it."""
        for token, _ in self.arrivals or ():
            self._note(token)
        return self


def settle() -> None:
    """Wait until nothing is in flight."""
    mx.synchronize()
    mx.synchronize(generation_stream)


@dataclass(frozen=True, slots=True)
class Models:
    """A target with its draft, in our generators and for mlx-lm's functions.

    Attributes:
        target: verifies.
        draft: proposes.
        plain: decodes without a draft.
        speculative: decodes with it.
        bare: target and draft without our hooks, for mlx-lm's functions.
    """

    target: nn.Module
    draft: nn.Module
    plain: SpeculativeGenerator
    speculative: SpeculativeGenerator
    bare: tuple[nn.Module, nn.Module] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bare", (bare(self.target), bare(self.draft)))

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
        decode: begins a job, or runs it as a whole.
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
        settle()
        return self.decode(job).follow()


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
    """Begin a job with one of our generators.

    Args:
        generator: with its draft.
        length: of the drafts; None: the generator's usual one.
        job: what to generate.
        explain: tell the reasons of the lengths, at the price of a hundredth.
    """
    run = Run()

    def arrivals() -> Arrivals:
        with generator.stream(
            job.prompt,
            max_tokens=job.tokens,
            sampling=job.sampling,
            stop_tokens=(),
            draft_length=length,
            explain=explain,
        ) as stream:
            run.statistics = stream.stats
            for chunk in stream:
                yield chunk.token, stream.stats.rounds
            for plan, outcome in stream.decisions if explain else ():
                spent = run.reasons.get(plan.reason, 0.0)
                run.reasons[plan.reason] = spent + outcome.seconds

    run.arrivals = arrivals()
    return run


def _mlx_lm_plain(models: Models, job: Job) -> Run:
    run = Run()

    def arrivals() -> Arrivals:
        mx.random.seed(job.seed)
        steps = generate_step(
            mx.array(job.prompt),
            models.bare[0],
            max_tokens=job.tokens,
            sampler=make_sampler(temp=job.temperature),
        )
        with wired(models.target), closing(steps):
            for token, _ in steps:
                run.statistics.count(drafted=0, accepted=0, emitted=1)
                yield int(token), run.statistics.rounds

    run.arrivals = arrivals()
    return run


def _mlx_lm_speculative(models: Models, length: int, job: Job) -> Run:
    run = Run()
    flags: list[bool] = []

    def arrivals() -> Arrivals:
        mx.random.seed(job.seed)
        steps = speculative_generate_step(
            mx.array(job.prompt),
            *models.bare,
            num_draft_tokens=length,
            max_tokens=job.tokens,
            sampler=make_sampler(temp=job.temperature),
        )
        try:
            with wired(models.target), closing(steps):
                for token, _, from_draft in steps:
                    yield int(token), flags.count(False)
                    flags.append(from_draft)
        except Exception as error:  # What it cannot do is a result, whatever it raises.
            when = f"failed after token {len(run.tokens)}" if run.tokens else "refused"
            run.failure = f"{when}: {type(error).__name__}: {error}"
        count_rounds(run.statistics, flags, length, job.tokens)

    run.arrivals = arrivals()
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

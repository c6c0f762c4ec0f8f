"""Measurement of drafts: plain and speculative decoding alternate on the same prompts.

An arm is one way to decode. In each pass all arms run the same prompt. The next pass
starts with the next arm, so that a slow phase of the machine affects all arms alike. A
speed-up is the median, over passes, of an arm's speed divided by that of plain decoding
in the same pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import harmonic_mean, median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_speculation import Sampling, SpeculativeGenerator
    from mlx_speculation.engine import Result, Statistics
    from mlx_speculation.engine.equivalence.texts import Parting

OURS, MLX_LM = "no draft", "mlx-lm, no draft"  # names of the two plain arms
WARM_UP_TOKENS = 16
# Above this ratio of plain decoding's fast passes to its slow ones, a machine is busy.
BUSY = 1.4


@dataclass(frozen=True, slots=True)
class Spread:
    """Values of several passes; `harmonic_mean` is the speed of all together."""

    median: float
    low: float
    high: float
    harmonic_mean: float  # slow passes count by their time

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return the spread of measured values."""
        return cls(median(values), min(values), max(values), harmonic_mean(values))


def busy(speeds: Sequence[float]) -> str | None:
    """Return a warning if plain decoding's speeds differ much; None: they do not."""
    cut = len(speeds) // 6  # extremes of many passes differ on a quiet machine, too
    low, high = sorted(speeds)[cut], sorted(speeds)[-1 - cut]
    if high <= BUSY * low:
        return None
    return (
        f"Plain decoding ran at {low:.1f} to {high:.1f} tokens/s, so these figures say "
        "little: other programs were busy, or texts differ much in length. Close other "
        "programs, and measure again."
    )


def ratio_note(plain: str) -> str:
    """Return what the column "x plain" of a table is; `plain` is an arm's name."""
    return (
        f'x plain: each pass divides the speed by that of "{plain}" in the same pass; '
        "the median of these ratios can differ from the ratio of the median speeds."
    )


def counted_texts(count: int, *, chat: bool) -> str:
    """Return a number of texts or chat messages in words."""
    return f"{count} {'chat message' if chat else 'text'}{'s' * (count != 1)}"


@dataclass(slots=True)
class Arm:
    """One way to decode, and its measurements."""

    name: str
    length: int | None  # tokens drafted in a round; 0: plain, None: adaptive
    draft: int = 0  # index of its generator
    speeds: list[float] = field(default_factory=list)  # tokens per second of each pass
    totals: "Statistics | None" = None  # counts over all passes; None for mlx-lm's arm
    # The first difference of each text that differs from our plain decoding's
    partings: "list[Parting]" = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Return whether all texts equal plain decoding's, apart from near-ties."""
        return all(parting.near_tie for parting in self.partings)

    def over(self, plain: Sequence[float]) -> Spread:
        """Return the spread, over passes, of the arm's speed divided by `plain`."""
        pairs = zip(self.speeds, plain, strict=False)
        return Spread.of([ours / other for ours, other in pairs])

    def add(self, speed: float, result: "Result | None") -> None:
        """Add the speed and the counts of a pass; mlx-lm's arm has no `result`."""
        self.speeds.append(speed)
        if result is None:
            return
        from mlx_speculation.engine import Statistics

        self.totals = self.totals or Statistics()
        self.totals.add(result.stats)


@dataclass(frozen=True, slots=True)
class Compared:
    """One prompt, continued with and without a draft."""

    plain: "Result"
    drafted: "Result"
    parting: "Parting | None"  # the first difference of the texts; None: they are equal

    @property
    def same(self) -> bool:
        """Return whether the texts are equal or differ first at a near-tie."""
        return self.parting is None or self.parting.near_tie


def arms_of(drafts: Sequence[str], lengths: Sequence[int | None]) -> list[Arm]:
    """Return the arms: the two plain ones, then each draft at each length."""
    drafted = [
        Arm(f"{name}, {_words(length)}", length, draft)
        for draft, name in enumerate(drafts)
        for length in lengths
    ]
    return [Arm(OURS, 0), Arm(MLX_LM, 0), *drafted]


def _words(length: int | None) -> str:
    if length is None:
        return "adaptive"
    return f"{length} token{'s' * (length != 1)}"


def measure(
    generators: "Sequence[SpeculativeGenerator]",
    arms: Sequence[Arm],
    prompts: Sequence[list[int]],
    *,
    tokens: int,
    sampling: "Sampling",
    passes: int,
    report: Callable[[int, int], None],
) -> int:
    """Run passes until done or Ctrl-C; fill the arms; return the number of full passes.

    The generators share the target. For each prompt, a plain text is made first, up to
    a stop token or `tokens`. All arms then ignore stop tokens, and generate as many
    tokens as this text has, at least 2. `report` is called with the number of runs
    done, and the total.
    """
    done, sizes = 0, dict[int, int]()
    try:
        for arm in arms:
            short = min(tokens, WARM_UP_TOKENS)
            _run(generators[arm.draft], sampling, arm, prompts[0], short)
        for number in range(passes):
            which, runs = number % len(prompts), {}
            prompt = prompts[which]
            if which not in sizes:
                text = generators[0].generate(
                    prompt, max_tokens=tokens, draft_length=0, sampling=sampling
                )
                sizes[which] = max(2, len(text.tokens))
            first = number % len(arms)
            for arm in [*arms[first:], *arms[:first]]:
                generator = generators[arm.draft]
                runs[arm.name] = _run(generator, sampling, arm, prompt, sizes[which])
                report(number * len(arms) + len(runs), passes * len(arms))
            plain = runs[OURS][1]
            partings = {
                name: parting_of(generators[0], sampling, prompt, plain, result)
                for name, (_, result) in runs.items()
                if plain and result and plain.tokens != result.tokens
            }
            for arm in arms:  # only after a complete pass
                arm.add(*runs[arm.name])
                if (parting := partings.get(arm.name)) is not None:
                    arm.partings.append(parting)
            done += 1
    except KeyboardInterrupt:
        pass
    return done


def _run(
    generator: "SpeculativeGenerator",
    sampling: "Sampling",
    arm: Arm,
    prompt: list[int],
    tokens: int,
) -> "tuple[float, Result | None]":
    """Return an arm's tokens per second, without prefill, and its result."""
    if arm.name == MLX_LM:  # greedy; its text is not compared
        from mlx_speculation.models import mlx_lm_speed

        return mlx_lm_speed(generator.model, prompt, tokens), None
    options: dict[str, Any] = {"sampling": sampling, "stop_tokens": ()}
    result = generator.generate(
        prompt, max_tokens=tokens, draft_length=arm.length, **options
    )
    return result.stats.tokens_per_second, result


def parting_of(
    generator: "SpeculativeGenerator",
    sampling: "Sampling",
    prompt: Sequence[int],
    plain: "Result",
    other: "Result",
) -> "Parting | None":
    """Return the first difference of two texts; None: they are equal."""
    from mlx_speculation.engine.equivalence.texts import find_parting
    from mlx_speculation.models import TokenIds, logit_width
    from mlx_speculation.samplers import Chooser

    ids = TokenIds.of(generator.tokenizer)
    chooser = Chooser(
        sampling,
        ids.width,
        limit=logit_width(generator.model),
        missing=ids.missing,
    )
    return find_parting(
        generator.model,
        chooser,
        prompt,
        plain.tokens,
        other.tokens,
        width=1 + len(other.stats.reached),
    )

"""Programs with several streams at once on every rank; see `rank_programs`."""

import gc
from collections.abc import Callable
from itertools import cycle
from typing import Any

from mlx_speculation import Sampling, SpeculativeGenerator
from mlx_speculation.engine.distributed import ring_watch
from mlx_speculation.engine.draft_length import calibration
from mlx_speculation.engine.draft_length.base import Feedback, Plan
from support.identity import SAMPLED, prompt_of
from support.models.tiny_models import build
from support.processes.rank_programs import (
    decisions,
    endless,
    generator,
    group,
    on_ranks,
    raised,
    rank,
    say,
    texts,
)

ONE, TWO = prompt_of(40), prompt_of(23)
TOKENS = 6
# The rank whose program differs, in tests of differing programs.
ODD = group.size() - 1


def make(length: int | None) -> Any:
    """Return a generator on all ranks, with a draft model on rank 0."""
    parts: tuple[Any, ...] = ("llama", "tensor")
    if group.size() > 2:  # a layer for each rank
        parts = ("qwen3_moe", "pipeline", group.size())
    draft = build("llama", seed=3) if rank == 0 and length != 0 else None
    return generator(on_ranks(*parts), draft, draft_length=length)


class Streams:
    """Orders of events in several streams; each method returns one stream's tokens."""

    def __init__(
        self, made: SpeculativeGenerator, sampling: Sampling, *, mixed: bool
    ) -> None:
        self._made, self._sampling, self._mixed = made, sampling, mixed

    def _stream(self, prompt: list[int]) -> Any:
        return self._made.stream(
            prompt,
            max_tokens=TOKENS,
            sampling=self._sampling,
            draft_length=Mixed() if self._mixed else None,
        )

    def alone(self) -> list[int]:
        return _rest(self._stream(ONE))

    def alone_too(self) -> list[int]:
        return _rest(self._stream(TWO))

    def dropped_before_its_begin(self) -> list[int]:
        one = self._stream(ONE)
        tokens = [next(one).token]
        two = self._stream(TWO)
        del two
        return tokens + _rest(one)

    def dropped(self) -> list[int]:
        """Drop one stream after 1 chunk and one after 5."""
        one = self._stream(ONE)
        tokens = [next(one).token]
        for count in (1, 5):
            two = self._stream(TWO)
            for _ in range(count):
                next(two)
            del two
            tokens.append(next(one).token)
        return tokens + _rest(one)

    def left_loop(self) -> list[int]:
        """Leave a loop over another stream after each chunk of the first."""
        tokens = []
        for chunk in self._stream(ONE):
            tokens.append(chunk.token)
            for count, _ in enumerate(self._stream(TWO)):
                if count == len(tokens) % 4:
                    break
        return tokens

    def closed(self) -> list[int]:
        """Close another stream twice, and a third one before it has begun."""
        one = self._stream(ONE)
        tokens = [next(one).token]
        two, three = self._stream(TWO), self._stream(TWO)
        with two:
            next(two)
        two.close()
        three.close()
        return tokens + _rest(one)

    def by_turns(self) -> list[int]:
        """Read one chunk of each in turn, and check the second text too."""
        one, two = self._stream(ONE), self._stream(TWO)
        tokens: tuple[list[int], list[int]] = ([], [])
        for _ in range(TOKENS):
            tokens[0].append(next(one).token)
            tokens[1].append(next(two).token)
        assert tokens[1] == self.alone_too()
        return tokens[0]

    def collected(self) -> list[int]:
        """Let a stream be garbage-collected, at a different moment on each rank."""
        gc.disable()
        two = self._stream(TWO)
        next(two)
        holder: list[Any] = [two]
        holder.append(holder)
        del two, holder
        tokens = []
        for chunk in self._stream(ONE):
            tokens.append(chunk.token)
            if len(tokens) == 1 + 3 * rank:
                assert gc.collect() > 0
        gc.enable()
        return tokens

    def first_dropped(self) -> list[int]:
        two = self._stream(TWO)
        next(two)
        one = self._stream(ONE)
        tokens = [next(one).token]
        del two
        return tokens + _rest(one)


class Mixed:
    """Mixes plain steps and drafts, so some drafts are planned during a plain step."""

    longest = 2

    def __init__(self) -> None:
        self._plans = cycle([0, 2, 2, 0, 0, 2])

    def plan(self, context: int, limit: int) -> Plan:
        return Plan(min(next(self._plans), limit), "fixed")

    def note(self, context: int, plan: Plan, outcome: Feedback) -> None:
        """Learn nothing."""


def _rest(stream: Any) -> list[int]:
    return [chunk.token for chunk in stream]


WAYS = [
    "dropped_before_its_begin",
    "dropped",
    "left_loop",
    "closed",
    "by_turns",
    "collected",
    "first_dropped",
]
# Draft lengths by the kind of drafts; None: adaptive. Streams of "mixed" have the plans
# of `Mixed` instead.
LENGTHS: dict[str, int | None] = {
    "mixed": 2,
    "plain": 0,
    "fixed": 2,
    "adaptive": None,
}


def several(*kinds: str) -> dict[str, dict[str, list[int]]]:
    """Return the texts of `Streams` by kind of drafts (default: all) and by method."""
    said: dict[str, dict[str, list[int]]] = {}
    for name in kinds or LENGTHS:
        sampling = SAMPLED if name == "adaptive" else Sampling()
        streams = Streams(make(LENGTHS[name]), sampling, mixed=name == "mixed")
        said[name] = {way: getattr(streams, way)() for way in ["alone", *WAYS]}
    return said


def all_and_lost(*cases: str) -> dict[str, Any]:
    """Run all programs in one launch, to save time; rank 1 is killed in the last."""
    calibration.PASSES = 1
    said: dict[str, Any] = {
        "texts": texts("tensor", *cases, by_turns=True, tokens=10),
        "decisions": decisions(),
        "several": several("mixed"),
        "apart": apart(),
    }
    say(said)
    ring_watch.SAY_SECONDS, ring_watch.END_SECONDS = 0.2, 1.0
    return said | {"lost": endless("wait", "1")}


def apart() -> dict[str, Any]:
    """Let the last rank run other programs; return errors, and texts after them."""
    made = make(2)
    said: dict[str, Any] = {"before": _text(made)}
    odd = rank == ODD

    def order() -> None:
        one, two = made.stream(ONE), made.stream(TWO)
        next(one)
        next(two)
        _rest(two if odd else one)

    def another_stream() -> None:
        one, two = made.stream(ONE), made.stream(TWO)
        next(one)
        _rest(two if odd else one)

    def another_generator() -> None:
        if odd:
            generator(made.model, draft_length=0)
        else:
            made.generate(ONE)

    def options_meanwhile() -> str:
        one = made.stream(ONE, max_tokens=TOKENS)
        tokens = [next(one).token]
        text = raised(lambda: made.generate(TWO, max_tokens=TOKENS + odd))
        assert tokens + _rest(one) == said["before"]
        return text

    def leaving() -> None:
        with made.stream(ONE) as one:
            next(one)
            if odd:
                raise ValueError("the last rank has failed")
            _rest(one)

    acts: list[Callable[[], Any]] = [order, another_stream, another_generator, leaving]
    for act in acts:
        said[act.__name__] = raised(act)
        said[f"after {act.__name__}"] = _text(made)
    said["options_meanwhile"] = options_meanwhile()
    return said


def _text(made: Any) -> list[int]:
    tokens: list[int] = made.generate(ONE, max_tokens=TOKENS).tokens
    return tokens

"""Timing of rounds: all time is counted, each part in its place.

Other programs can delay a round anywhere. So the tests only require that a part with a
sleep takes at least as long as the sleep. They compare device times by lower quartiles.
"""

import time
from itertools import pairwise
from statistics import quantiles
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_speculation import (
    BatchGenerator,
    Sampling,
    SpeculativeGenerator,
    pure,
    regex,
)
from mlx_speculation.engine.draft_length.base import Feedback, FixedDraftLength, Plan
from mlx_speculation.engine.drafters.base import Choose, Proposal
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.engine.round import decoder
from mlx_speculation.engine.round.forced import forced_drafts
from mlx_speculation.engine.stats import Statistics
from mlx_speculation.engine.timing import RoundClock, RoundSeconds
from support.covering import covering
from support.drafters.scripted_drafter import ScriptedDrafter
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer

PROMPT = [(5 * i * i + 3) % 256 for i in range(21)]
PARTS = ("draft", "verify", "sampler", "host")
NAP = 0.01


def parts(stats: Statistics) -> dict[str, float]:
    return {name: getattr(stats, f"{name}_seconds") for name in PARTS}


def generator(draft: Any = None, name: str = "llama") -> SpeculativeGenerator:
    return SpeculativeGenerator(build(name), byte_tokenizer(), draft=draft)


def sequential(tokens: mx.array, logits: mx.array) -> mx.array:
    return logits


WAYS: dict[str, dict[str, Any]] = {
    "plain": {"draft_length": 0},
    "drafted": {"draft_length": 3},
    "in turn": {
        "draft_length": 3,
        "sampling": Sampling(logits_processors=(sequential,)),
    },
    "plain in turn": {
        "draft_length": 0,
        "sampling": Sampling(logits_processors=(sequential,)),
    },
}


@pytest.mark.parametrize(
    ("explain", "way", "name"), covering((False, True), WAYS, ("llama", "qwen3_5"))
)
def test_the_parts_are_all_of_the_rounds_time(
    name: str, way: str, explain: bool
) -> None:
    made = generator(build(name, seed=7), name)
    made.generate(PROMPT, max_tokens=8, **WAYS[way])  # kernels and hooks
    stream = made.stream(
        PROMPT, max_tokens=32, stop_tokens=(), explain=explain, **WAYS[way]
    )
    start = time.perf_counter()
    next(stream)
    started = time.perf_counter()
    assert 0 < stream.stats.prefill_seconds < started - start
    before = stream.stats.decode_seconds
    for _ in stream:
        pass
    wall = time.perf_counter() - started
    stats = stream.stats
    assert all(seconds >= 0 for seconds in parts(stats).values())
    assert stats.decode_seconds == pytest.approx(sum(parts(stats).values()))
    assert 0.7 * wall < stats.decode_seconds - before < wall
    assert stats.verify_seconds > 0
    assert stats.host_seconds > 0
    assert (stats.draft_seconds > 0) == (stats.drafted > 0)
    if explain:
        assert stats.sampler_seconds > 0
        each = [outcome for _, outcome in stream.decisions]
        assert sum(one.seconds for one in each) == pytest.approx(stats.decode_seconds)
        for one in each:
            assert one.parts.total == pytest.approx(one.seconds)


class Nap:
    def __init__(self) -> None:
        self.seconds = 0.0

    def take(self) -> None:
        started = time.perf_counter()
        time.sleep(NAP)
        self.seconds += time.perf_counter() - started


@pytest.mark.parametrize("rows", [1, 2])
def test_the_search_for_forced_tokens_is_counted(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search waits for the step in flight."""
    made, nap, planned = generator(build("llama", seed=7)), Nap(), list[float]()
    forced, start = forced_drafts, RoundClock.start

    def slow(*args: Any) -> Any:
        nap.take()
        return forced(*args)

    def started(clock: RoundClock, *, planning: float = 0.0, **more: Any) -> None:
        planned.append(planning)
        start(clock, planning=planning, **more)

    monkeypatch.setattr(decoder, "forced_drafts", slow)
    monkeypatch.setattr(RoundClock, "start", started)
    constraint = regex("x?y[a-z ]{60}", byte_tokenizer())
    options: dict[str, Any] = {"constraint": constraint, "max_tokens": 12}
    with BatchGenerator(made) as batch:
        if rows == 1:
            made.generate(PROMPT, draft_length=2, **options)
        for _ in range(rows - 1):
            batch.insert(PROMPT, draft_length=2, **options)
        while batch.waiting or batch.running:
            batch.next()
    assert len([each for each in planned if each >= NAP]) >= 4
    assert all(each >= NAP for each in planned if each)


class Sleepy(ScriptedDrafter):
    def __init__(self, script: list[int], nap: Nap) -> None:
        super().__init__(script, 1.0)
        self.nap = nap

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        self.nap.take()
        return super().propose(sequence, limit, choose)


def busy(rows: mx.array) -> mx.array:
    """Return zeros [rows, 1], which take the device some milliseconds to compute."""
    x = rows[:, :1].astype(mx.float32)
    big = mx.broadcast_to(x.sum() * 0 + 1, (240, 240))
    return x * 0 + (big @ big).max() * 0


@pure
def slow_to_compute(tokens: mx.array, logits: mx.array) -> mx.array:
    return logits + busy(logits)


class SlowLogits(nn.Module):
    """A model whose forward takes some milliseconds more on the device."""

    def __init__(self, model: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self.layers = model.layers

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        logits: mx.array = self.model(ids, cache=cache)
        return logits + busy(logits[0])[-1]


class NotedRounds(FixedDraftLength):
    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.rounds: list[RoundSeconds] = []

    def note(self, context: int, plan: Plan, outcome: Feedback) -> None:
        self.rounds.append(outcome.parts)

    @property
    def largest(self) -> str:
        """The part with the largest lower quartile."""

        def quartile(name: str) -> float:
            seconds: list[float] = [getattr(parts, name) for parts in self.rounds]
            return quantiles(seconds, n=4)[0]

        return max(PARTS, key=quartile)


@pytest.mark.parametrize("explain", [False, True])
@pytest.mark.parametrize("length", [0, 3])
def test_each_part_gets_what_is_slow_in_it(length: int, explain: bool) -> None:
    plain = generator().generate(PROMPT, max_tokens=56, stop_tokens=())
    script = PROMPT + plain.tokens

    def run(
        made: SpeculativeGenerator, *processors: Any, tokens: int = 48
    ) -> tuple[str, dict[str, float]]:
        sampling, noted = Sampling(logits_processors=processors), NotedRounds(length)
        stream = made.stream(
            PROMPT,
            max_tokens=tokens,
            stop_tokens=(),
            sampling=sampling,
            draft_length=noted,
            explain=explain,
        )
        for _ in stream:
            pass
        return noted.largest, parts(stream.stats)

    nap = Nap()

    @pure
    def slow_to_build(tokens: mx.array, logits: mx.array) -> mx.array:
        nap.take()
        return logits

    model, scripted = SlowLogits(build("llama")), ScriptedDrafter(script, 1.0)
    slow = SpeculativeGenerator(model, byte_tokenizer(), draft=scripted)
    assert run(slow)[0] == "verify"
    fast = generator(scripted)
    _, seconds = run(fast, slow_to_build, tokens=16)
    assert seconds["host"] > nap.seconds > 0
    if length:
        nap.seconds = 0
        _, seconds = run(generator(Sleepy(script, nap)), tokens=16)
        assert seconds["draft"] > nap.seconds > 0
    if not length:  # without `explain`, "verify" includes the sampler
        assert (seconds["sampler"] > 0) == explain
    if length and explain:
        assert run(fast, slow_to_compute)[0] == "sampler"


def test_a_draft_models_work_is_the_drafts() -> None:
    slow = SlowLogits(build("llama", seed=7))
    noted = NotedRounds(6)
    generator(slow).generate(PROMPT, max_tokens=16, draft_length=noted)
    assert noted.largest == "draft"


def test_a_constraint_moves_no_step_to_the_host() -> None:
    """A step's mask needs the token of the step before it.

    The wait for that step's logits counts as verify, not as host.
    """
    model = SlowLogits(build("llama"))
    plain = SpeculativeGenerator(model, byte_tokenizer())
    noted = NotedRounds(0)
    plain.generate(
        PROMPT,
        max_tokens=24,
        constraint=regex("[a-z ]{60}", byte_tokenizer()),
        draft_length=noted,
    )
    assert noted.largest == "verify"


def test_a_failed_round_takes_no_time() -> None:
    made = generator(build("llama", seed=7))

    class Failing:
        calls = 0

        def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
            self.calls += 1
            if self.calls == 3:
                raise ZeroDivisionError
            return logits

    stream = made.stream(
        PROMPT,
        draft_length=0,
        stop_tokens=(),
        sampling=Sampling(logits_processors=(Failing(),)),
    )
    spent = [stream.stats.decode_seconds]
    for _ in range(2):
        next(stream)
        spent.append(stream.stats.decode_seconds)
    with pytest.raises(ZeroDivisionError):
        next(stream)
    assert all(one < other for one, other in pairwise(spent))
    assert stream.stats.decode_seconds == spent[-1]


def test_what_is_done_before_a_wait_and_after_the_last_is_the_hosts() -> None:
    clock, ready = RoundClock(), mx.array(1) + 1
    mx.eval(ready)
    time.sleep(NAP)
    clock.wait("verify", ready)
    time.sleep(NAP)
    clock.submit("verify", ready)
    time.sleep(NAP)
    seconds = clock.stop()
    assert seconds.host >= 3 * NAP
    assert seconds.verify < NAP


def slept(value: int) -> int:
    time.sleep(NAP)
    return value


def test_where_nothing_waits_to_hand_over_a_graph_is_the_hosts() -> None:
    clock, ready = RoundClock(waits=False), mx.array(1) + 1
    assert clock.hand_over("verify", slept, 3) == 3
    clock.submit("verify", ready)
    seconds = clock.stop()
    assert seconds.host >= NAP
    assert seconds.verify == 0
    clock = RoundClock()
    assert clock.hand_over("verify", slept, 4) == 4
    assert clock.stop().verify >= NAP

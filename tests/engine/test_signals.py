"""Ctrl-C at any moment of a stream or batch neither loses nor repeats a token.

A timer's handler raises only while code of this package runs: a library cannot prevent
that its caller loses a token that was already returned. It does not raise where Python
drops exceptions; tests/test_deferred_signals.py is about these places.
"""

import gc
import random
import signal
import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from mlx_lm.models.cache import make_prompt_cache

import mlx_speculation
from mlx_speculation import (
    BatchGenerator,
    BatchResponse,
    PrefixCache,
    Sampling,
)
from mlx_speculation.engine.stream import Stream
from mlx_speculation.interrupts import finalize
from support.drafters.batches import Bench, Case, bench
from support.identity import prompt_of
from support.processes.interrupts import at_opcode

OURS = str(Path(mlx_speculation.__file__).parent)
NAMES = ("llama", "gemma3_text", "qwen3_5", "mamba", "recurrent_gemma")
KINDS = ("model", "lookup", "none")
SAMPLED = Sampling(temperature=0.8, seed=1)
TOKENS = 16


def ours(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(OURS):
            return True
        frame = frame.f_back
    return False


def dropped(frame: FrameType | None) -> bool:
    """Return whether Python would drop an exception raised here."""
    callbacks = {getattr(each, "__code__", None) for each in gc.callbacks}
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__del__" or code.co_filename == weakref.__file__:
            return True
        if code in callbacks:
            return True
        frame = frame.f_back
    return False


class Interruptions:
    """A timer whose signal raises KeyboardInterrupt once each time it is set."""

    def __init__(self) -> None:
        self.hits = 0

    def handler(self, number: int, frame: FrameType | None) -> None:
        if ours(frame) and not dropped(frame):
            self.hits += 1
            raise KeyboardInterrupt
        self.after(2e-5)

    def after(self, seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))

    def off(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextmanager
def interruptions() -> Iterator[Interruptions]:
    timer = Interruptions()
    before = signal.signal(signal.SIGALRM, timer.handler)
    try:
        yield timer
    finally:
        timer.off()
        assert signal.signal(signal.SIGALRM, before) == timer.handler


def signal_at_opcode(number: int) -> AbstractContextManager[list[int]]:
    """Raise the timer's signal at opcode `number` of this package's frames."""
    # Python drops an exception in these two until finalize() has deferred signals.
    skip = (Stream.__del__.__code__, finalize.__code__)
    return at_opcode(
        number, OURS, lambda: signal.raise_signal(signal.SIGALRM), skip=skip
    )


CASES = [
    Case(6, Sampling(), TOKENS),
    Case(17, SAMPLED, 9),
    Case(2, Sampling(temperature=0.8, top_p=0.9, seed=3), TOKENS),
    Case(40, SAMPLED, 12, prefill_step=12),
    Case(23, Sampling(), 1),
]


class Played:
    """A batch that is interrupted, and the responses that it has returned."""

    def __init__(self, made: Bench, kind: str) -> None:
        self.made = made
        self.batch = BatchGenerator(made.generator(kind), max_rows=3)
        self.rows = {made.insert(self.batch, case): case for case in CASES}
        self.responses: list[BatchResponse] = []
        self.interrupted = self.calls = 0

    def next(self) -> None:
        self.calls += 1
        assert self.calls < 300, "the rows never end"
        responses = None
        try:
            responses = self.batch.next()
        except KeyboardInterrupt:
            self.interrupted += 1
        if responses is not None:
            self.responses += responses

    @property
    def running(self) -> bool:
        return bool(self.batch.running or self.batch.waiting)

    def check(self) -> None:
        """Require each row's text, and that each token was returned once."""
        self.responses += self.batch.next()  # pending responses
        assert self.batch.next() == []
        for uid, case in self.rows.items():
            result = self.batch.result(uid)
            assert result.finish_reason == "length"
            assert len(result.tokens) == case.max_tokens
            self.made.check(case, result.tokens)
            row_responses = [
                response for response in self.responses if response.uid == uid
            ]
            chunks = [
                response.chunk
                for response in row_responses
                if response.chunk is not None
            ]
            assert [chunk.token for chunk in chunks] == result.tokens
            assert "".join(chunk.text for chunk in chunks) == result.text
            assert [r.finish_reason for r in row_responses if r.finish_reason] == [
                "length"
            ]
        assert self.batch.stats.emitted == sum(case.max_tokens for case in CASES)
        assert self.batch.stats.finished == len(CASES)
        assert self.batch.memory == 0
        self.batch.close()


def opcodes_of_a_call(made: Bench, kind: str, calls: int) -> int:
    """Return the number of opcodes of a call of `next` after `calls` others."""
    played = Played(made, kind)
    for _ in range(calls):
        played.next()
    with signal_at_opcode(0) as left:
        played.next()
    played.batch.close()
    return -left[0]


@pytest.mark.parametrize("many", [5, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "calls"), [("model", 0), ("model", 3), ("none", 2)])
def test_a_signal_at_any_opcode_of_a_call_changes_nothing(
    kind: str, calls: int, many: int
) -> None:
    """This includes opcodes between a commit and the return of responses."""
    made = bench("llama")
    count = opcodes_of_a_call(made, kind, calls)
    met = 0
    with interruptions() as timer:
        for opcode in range(1, count, -(-count // many)):
            played = Played(made, kind)
            for _ in range(calls):
                played.next()
            with signal_at_opcode(opcode):
                played.next()
            timer.off()
            met += played.interrupted
            while played.running:
                played.next()
            played.check()
    assert met > many / 2


@pytest.mark.parametrize("many", [12, pytest.param(120, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["model", "none"])
def test_a_signal_at_any_opcode_of_a_streams_round_loses_no_token(
    kind: str, many: int
) -> None:
    made, prompt = bench("llama"), prompt_of(17)
    generator, hits = made.generator(kind), 0
    options: dict[str, Any] = {"max_tokens": TOKENS, "stop_tokens": ()}
    text = prompt + made.generator("none").generate(prompt, **options).tokens

    def started(caches: list[Any]) -> tuple[Stream, list[int]]:
        stream = generator.stream(prompt, prompt_cache=caches, **options)
        tokens = [next(stream).token]
        while stream.generation.chunks.ready:
            tokens.append(next(stream).token)
        return stream, tokens

    next(started(make_prompt_cache(made.model))[0])  # for work that is done only once
    stream, _ = started(make_prompt_cache(made.model))
    with signal_at_opcode(0) as left:
        next(stream)
    stream.close()
    with interruptions() as timer:
        for opcode in range(1, -left[0], -left[0] // many):
            caches = make_prompt_cache(made.model)
            stream, tokens = started(caches)
            try:
                with signal_at_opcode(opcode):
                    tokens.append(next(stream).token)
            except KeyboardInterrupt:
                hits += 1
            timer.off()
            stream.close()
            kept = stream.cached_tokens
            assert stream.result.tokens == tokens, opcode
            assert kept == text[: len(kept)], opcode
            assert len(kept) >= len(prompt) + len(tokens) - 1, opcode
            assert {cache.offset for cache in caches} == {len(kept)}, opcode
    assert hits > many / 2


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        ("llama", Sampling()),
        ("qwen3_5", SAMPLED),
        *(pytest.param(n, SAMPLED, marks=pytest.mark.slow) for n in NAMES),
    ],
)
def test_a_signal_at_any_time_of_a_stream_closes_it(
    name: str, sampling: Sampling
) -> None:
    """The yielded tokens are the result, and the caches can continue after them."""
    made, dice, hits = bench(name), random.Random(name), 0
    prompt, case = prompt_of(17), Case(17, sampling, TOKENS)
    for kind in KINDS:
        generator = made.generator(kind)
        for _ in range(2):
            caches = make_prompt_cache(made.model)
            known, cached = list(prompt), list[int]()
            longest = 0.01
            with interruptions() as timer:
                while (left := len(prompt) + TOKENS - len(known)) > 0:
                    stream = generator.stream(
                        known[len(cached) :],
                        prompt_cache=caches,
                        cached_tokens=cached,
                        max_tokens=left,
                        sampling=sampling,
                        stop_tokens=(),
                    )
                    chunks = []
                    timer.after(dice.uniform(0, longest))
                    try:
                        for chunk in stream:
                            chunks.append(chunk)
                    except KeyboardInterrupt:
                        hits += 1
                        longest *= 1.1  # or a slow machine would never get through
                        stream.close()  # the signal may precede next()
                    timer.off()
                    result, cached = stream.result, stream.cached_tokens
                    got = [chunk.token for chunk in chunks]
                    # If the text ended before the signal, its last chunk can be lost.
                    lost = len(result.tokens) - len(got)
                    assert lost == 0 or (lost == 1 and result.finish_reason == "length")
                    assert got == result.tokens[: len(got)]
                    assert cached[: len(known)] == known[: len(cached)]
                    whole = known + result.tokens
                    assert cached[: len(whole)] == whole[: len(cached)]
                    if len(cached) >= len(known) and result.next_token is not None:
                        known = [*cached, result.next_token]
            made.check(case, known[len(prompt) :][:TOKENS])
    assert hits


def test_a_signal_while_a_stream_is_dropped_is_raised_after_it() -> None:
    """Committed rows still go to the prefix cache."""
    made = bench("llama")

    def drop(opcode: int) -> int:
        """Drop a stream with a signal; return the number of opcodes left."""
        prefixes = PrefixCache(1 << 26)
        one = made.generator("none", prefix_cache=prefixes)
        stream = one.stream(prompt_of(17), max_tokens=TOKENS, stop_tokens=())
        next(stream)
        try:
            with signal_at_opcode(opcode) as left:
                del stream
            if opcode and left[0] <= 0:
                time.sleep(30)
        finally:
            assert prefixes.nbytes > 0, opcode
        return left[0]

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        drop(0)  # for work that is done only once
        count, raised = -drop(0), 0
        assert count > 100
        for opcode in range(1, count, -(-count // 12)):
            try:
                assert drop(opcode) > 0, opcode  # ended before the signal
            except KeyboardInterrupt:
                raised += 1
        assert raised > 5
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("joined", [False, True])
def test_an_error_that_a_handler_raises_ends_no_row(joined: bool) -> None:
    """For example, a caller's time limit is over; the drafter is not blamed."""
    made, case = bench("llama"), Case(40, Sampling(), 9, prefill_step=12)

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    try:
        with BatchGenerator(made.generator("model")) as batch:
            uid = made.insert(batch, case)
            while joined and not batch.running:
                batch.next()
            with signal_at_opcode(600), pytest.raises(TimeoutError):
                batch.next()
            while batch.running or batch.waiting:
                batch.next()
            assert batch.error(uid) is None
            assert batch.result(uid).stats.drafter_faults == []
            made.check(case, batch.result(uid).tokens)
    finally:
        signal.signal(signal.SIGALRM, before)

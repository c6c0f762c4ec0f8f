"""Ctrl-C during a finalizer is raised afterwards; Python alone would drop it.

One test raises a signal at each opcode of the functions that `finalize` calls. No code
can catch a signal before the first instruction of a finalizer.
"""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from mlx_speculation import interrupts
from mlx_speculation.interrupts import DeferredSignals, finalize
from support.processes.interrupts import at_opcode
from support.processes.programs import python


class Dropped:
    def __init__(self, clean_up: Callable[[], object]) -> None:
        self.clean_up = clean_up

    def __del__(self) -> None:
        finalize(self.clean_up)


def signal_at(number: int) -> AbstractContextManager[list[int]]:
    """Raise SIGINT at the opcode `number` of the functions that `finalize` calls."""
    return at_opcode(
        number,
        interrupts.__file__,
        lambda: signal.raise_signal(signal.SIGINT),
        skip=(finalize.__code__,),
    )


@pytest.fixture(name="dropped_errors")
def _dropped_errors(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    dropped: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", dropped.append)
    return dropped


def drop(clean_up: Callable[[], object], opcode: int) -> int:
    """Finalize an object, and raise SIGINT at opcode number `opcode`.

    Returns:
        `opcode` minus the number of opcodes that ran.
    """
    dropped = Dropped(clean_up)
    with signal_at(opcode) as left:
        del dropped
    return left[0]


def test_a_signal_at_any_opcode_is_raised_after_the_finalizer(
    dropped_errors: list[Any],
) -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    count = -drop(lambda: None, 0)
    assert count > 100
    for opcode in range(1, count + 1):
        cleaned: list[int] = []
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            drop(lambda: cleaned.append(1), opcode)  # noqa: B023
            time.sleep(30)
        assert cleaned == [1], opcode
        assert dropped_errors == [], opcode
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_a_handler_of_another_signal_raises_is_raised_too(
    dropped_errors: list[Any],
) -> None:
    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("too late")

    before = signal.signal(signal.SIGALRM, late)
    try:
        dropped = Dropped(lambda: signal.raise_signal(signal.SIGALRM))
        with pytest.raises(TimeoutError, match="too late"):  # noqa: PT012
            del dropped
            time.sleep(30)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert dropped_errors == []


def test_it_waits_for_other_finalizers_and_for_a_round(
    dropped_errors: list[Any],
) -> None:
    seen: list[str] = []

    class Outer:
        def __del__(self) -> None:
            drop(lambda: signal.raise_signal(signal.SIGINT), 0)
            time.sleep(0.05)
            seen.append("finalizer")

    outer = Outer()
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        del outer
        with DeferredSignals():
            time.sleep(0.05)
            seen.append("round")
    assert seen == ["finalizer", "round"]
    assert dropped_errors == []


def test_what_cleaning_up_raises_is_reported_beside_the_signal(
    dropped_errors: list[Any],
) -> None:
    def fail() -> None:
        signal.raise_signal(signal.SIGINT)
        raise OSError("it cannot be cleaned")

    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        drop(fail, 0)
        time.sleep(30)
    (reported,) = dropped_errors
    assert str(reported.exc_value) == "it cannot be cleaned"


def test_a_finalizer_of_another_thread_only_cleans_up() -> None:
    cleaned: list[int] = []
    thread = threading.Thread(target=finalize, args=(lambda: cleaned.append(1),))
    thread.start()
    thread.join()
    assert cleaned == [1]


PROGRAM = """
from mlx_speculation import (
    BatchGenerator, PrefixCache, SpeculativeGenerator, stream_generate
)
import io, sys, types
sys.path.insert(0, {tests!r})
from support.models.tiny_models import build
from support.models.tiny_tokenizer import letter_tokenizer

model, tokenizer, prompt = build("llama", vocab=26), letter_tokenizer(26), [1, 2, 3]
draft = build("llama", vocab=26)
generator = SpeculativeGenerator(
    model, tokenizer, draft=draft, prefix_cache=PrefixCache(1 << 20)
)
plain = SpeculativeGenerator(model, tokenizer)
ended = plain.stream(prompt, max_tokens=8)
for chunk in ended:
    pass
entered = generator.stream(prompt, max_tokens=8).__enter__()
never = generator.stream(prompt, max_tokens=8)

batch = BatchGenerator(generator)
batch.insert(prompt, max_tokens=1)
batch.insert(prompt, max_tokens=8)

def texts(opened):
    with opened as stream:
        while True:
            yield stream.next_round()

def rows(opened):
    with opened as batch:
        while True:
            yield batch.next()

# Each has its own globals: shared ones would put all objects into one reference cycle,
# which is collected before modules are.
texts, rows = (types.FunctionType(each.__code__, {{}}) for each in (texts, rows))
halves = [
    generator.stream(prompt, max_tokens=8),
    texts(generator.stream(prompt, max_tokens=8)),
    rows(batch),
    stream_generate(model, tokenizer, prompt, max_tokens=8, draft_model=draft),
]
for half in halves:
    next(half)
io.kept = ended, entered, never, halves  # a module that is emptied late
"""


def test_a_program_may_end_with_streams_batches_and_generators_open() -> None:
    """Finalizers work after Python has set the globals of modules to None."""
    tests = str(Path(__file__).parent)
    command = python(PROGRAM.format(tests=tests))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

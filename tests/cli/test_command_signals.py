"""A first SIGINT or SIGTERM interrupts a command; a second one forces its end."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import typer

from mlx_speculation import demo_models, signals
from mlx_speculation.cli.run_app import guarded
from support.processes.programs import command_line
from support.processes.wait_until import until

DENSE = str(demo_models()["dense"])
STOCK = ["--blas", "stock"]
ON = ["--logit-bias", '{"0": -1000}', "-m", "100000"]
LONG = ["-p", "def f(x): return x\n" * 2000, "--prefill-step-size", "100000"]
BOTH = (signal.SIGINT, signal.SIGTERM)
COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    "generate": lambda _: ["generate", DENSE, "-p", "x = 1\n", *ON],
    "chat": lambda _: ["chat", DENSE, *ON],
    "benchmark": lambda _: ["benchmark", DENSE, "--draft", "lookup"],
    "train": lambda out: ["train", DENSE, "--out", str(out), "--minutes", "9"],
}


@contextmanager
def started(*options: str) -> Iterator["subprocess.Popen[str]"]:
    """Run a command whose standard input stays open; kill it when the block ends."""
    with subprocess.Popen(
        command_line(*options, *STOCK),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_a_second_signal_ends_what_no_handler_interrupts() -> None:
    """The prompt is read in one forward, which takes 20 seconds."""
    with started("generate", DENSE, *LONG) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "was made for" in line:
                break
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(2) == 128 + signal.SIGTERM


@pytest.mark.slow  # slow: each case starts four processes with a model
@pytest.mark.parametrize("number", BOTH)
@pytest.mark.parametrize("name", COMMANDS)
def test_two_signals_at_any_time_end_a_command(
    name: str, number: signal.Signals, tmp_path: Path
) -> None:
    for seconds in (0.5, 1.5, 3.0, 6.0):
        with started(*COMMANDS[name](tmp_path / "draft")) as process:
            assert process.stdin is not None
            process.stdin.write("hello\n")
            process.stdin.flush()
            time.sleep(seconds)
            process.send_signal(number)
            time.sleep(0.2)
            process.send_signal(number)
            assert process.wait(2) in (128 + number, -number)
            assert process.stderr is not None
            assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize("number", BOTH)
def test_the_first_signal_of_a_command_is_its_status(number: signal.Signals) -> None:
    def goes_up() -> None:
        signal.raise_signal(number)

    def is_caught() -> None:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        raise typer.Exit(130)

    before = [signal.getsignal(each) for each in BOTH]
    for command in (goes_up, is_caught):
        with pytest.raises(typer.Exit) as caught:
            guarded(command)()
        assert caught.value.exit_code == 128 + number
    assert [signal.getsignal(each) for each in BOTH] == before


def test_only_a_second_signal_without_an_end_between_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(signals, "end_within", lambda _, status: ended.append(status))

    def interrupt(number: signal.Signals) -> None:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)

    def talk() -> None:
        for _ in range(3):
            interrupt(signal.SIGINT)
            signals.resume()
        interrupt(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signals.resume()
        assert ended == []
        signal.raise_signal(signal.SIGINT)  # the second signal raises nothing
        until(lambda: ended == [128 + signal.SIGINT])

    guarded(talk)()
    until(lambda: "signals" not in {each.name for each in threading.enumerate()})


def test_signals_that_are_ignored_stay_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with signals.interruptible():
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGINT, before)

"""The runner of the stages of `make test`."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "scripts" / "run_stages.sh")


def run(*stages: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["sh", SCRIPT, *stages],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def test_stages_run_in_order_and_their_times_come_last(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    clock.write_text("1000")
    (tmp_path / "date").write_text(f"#!/bin/sh\ncat {clock}\n")
    (tmp_path / "date").chmod(0o755)
    wait = f"echo 1007 > {clock}"
    stages = ("one: echo first: x", f"two: {wait} && echo 'second'", "three: true")
    done = run(*stages, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 0
    assert done.stderr == ""
    *said, last = done.stdout.splitlines()
    assert said == ["first: x", "second"]
    assert last == "stages: one 0 s, two 7 s, three 0 s"


@pytest.mark.parametrize("status", [1, 5])
def test_a_stage_that_fails_is_the_last_and_its_status_is_kept(status: int) -> None:
    done = run("good: echo said", f"bad: exit {status}", "never: echo not me")
    assert done.returncode == status
    said, last = done.stdout.splitlines()
    assert said == "said"
    assert re.fullmatch(
        rf"stages: good \d+ s, bad \d+ s \(failed with status {status}\)", last
    )


def test_a_stage_runs_beside_the_others_and_the_last_waits_for_it(
    tmp_path: Path,
) -> None:
    file = tmp_path / "there"
    wait = f"for i in $(seq 300); do [ -e {file} ] && break; sleep 0.1; done"
    beside = f"slow&: {wait}; sleep 0.2; test -e {file} && echo slow"
    done = run(beside, f"one: touch {file}; echo one", "last: echo last")
    assert done.returncode == 0
    *said, last = done.stdout.splitlines()
    assert said == ["one", "slow", "last"]
    assert re.fullmatch(r"stages: one \d+ s, slow \d+ s, last \d+ s", last), last


def test_the_last_does_not_run_after_a_failure_beside_it() -> None:
    done = run("bad&: echo no; exit 3", "one: sleep 0.2; echo one", "last: echo last")
    assert done.returncode == 3
    *said, last = done.stdout.splitlines()
    assert said == ["one", "no"]
    pattern = r"stages: one \d+ s, bad \d+ s \(failed with status 3\)"
    assert re.fullmatch(pattern, last), last


def test_a_failure_ends_what_runs_beside_it(tmp_path: Path) -> None:
    file, start = tmp_path / "id", time.monotonic()
    beside = f"slow&: echo $$ > {file}; exec sleep 60"
    done = run(beside, f"bad: until [ -s {file} ]; do :; done; exit 4", "last: echo no")
    assert time.monotonic() - start < 30
    assert done.returncode == 4
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)
    assert re.fullmatch(r"stages: bad \d+ s \(failed with status 4\)\n", done.stdout), (
        done.stdout
    )


def test_ctrl_c_ends_the_stages_and_the_rest() -> None:
    stages = (
        "beside&: exec sleep 60",
        "long: echo begun; exec sleep 60",
        "never: echo no",
    )
    with subprocess.Popen(
        ["sh", SCRIPT, *stages],
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as script:
        assert script.stdout is not None
        assert script.stdout.readline() == "begun\n"
        started = time.monotonic()

        os.killpg(script.pid, signal.SIGINT)
        last = script.stdout.read()
        assert script.wait() == 130
        assert time.monotonic() - started < 30
    assert re.fullmatch(r"stages: long \d+ s \(failed with status 130\)\n", last)


def test_make_ends_with_the_stages() -> None:
    """`make test` runs all four stages, and shows the slowest tests of the last."""
    shown = subprocess.run(
        ["make", "--dry-run", "test"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    command = shown[shown.index("sh scripts/run_stages.sh") :]
    assert re.findall(r'"(\w+&?): ', command) == ["docs&", "ruff", "mypy", "pytest"]
    assert "--durations=10" in command

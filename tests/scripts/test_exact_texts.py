"""The program that counts the texts which a draft changes."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = str(Path(__file__).parents[2] / "scripts")
sys.path.insert(0, SCRIPTS)
exact_texts = importlib.import_module("bench.exact_texts")
sys.path.remove(SCRIPTS)
TINY = ["--tokens", "12", "--layers", "2", "--json"]


def run(*options: str) -> list[dict[str, Any]]:
    """Return the arms of a run with tiny models."""
    arms = exact_texts.main([*TINY, *options])["arms"]
    assert isinstance(arms, list)
    return arms


@pytest.mark.parametrize(
    ("shape", "drafts"),
    [
        ("llama", ["random"]),
        *(
            pytest.param(shape, exact_texts.DRAFTS, marks=pytest.mark.slow)
            for shape in ("llama", "sliding", "hybrid")
        ),
    ],
)
def test_no_text_differs_in_exact_mode(
    shape: str, drafts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    arms = run("--shape", shape, "--texts", "2", "--drafts", *drafts)
    assert json.loads(capsys.readouterr().out)["arms"] == arms
    assert len(arms) == 2 * 2 * (1 + len(drafts))
    for arm in arms:
        assert arm["texts"] == 2
        assert 12 - 8 <= arm["timed_tokens"] < 12
        assert arm["speed"] > 0
        assert arm["processor_seconds"] > 0
        assert (arm["drafted"] > 0) == (arm["draft"] not in (None, "lookup"))
        if arm["exact"] == 8:
            assert arm["different"] == arm["other_probabilities"] == 0
            assert arm["first"] is None


def test_texts_that_differ_are_counted() -> None:
    class Text:
        def __init__(self, *tokens: int) -> None:
            self.tokens, self.logprobs = [*tokens], [-0.5 * t for t in tokens]

    arm = exact_texts.Arm(None, 0.0, "random")
    for text in (Text(1, 2, 3), Text(1, 2, 4), Text(1, 5, 3)):
        arm.compare(text, Text(1, 2, 3))
    assert (arm.different, arm.other_probabilities, arm.first) == (2, 2, 1)
    arm.add(dict.fromkeys(exact_texts.COUNTS, 3) | {"first": 0})
    assert (arm.different, arm.accepted, arm.first) == (5, 3, 0)


def test_no_text_begins_once_the_time_is_over() -> None:
    arms = run("--shape", "llama", "--drafts", "random", "--seconds", "0")
    assert [arm["texts"] for arm in arms] == [0] * 8


@pytest.mark.slow
def test_processes_share_the_texts() -> None:
    few = ("--shape", "llama", "--drafts", "random", "--texts", "8")
    arms = run(*few, "--jobs", "2", "--control-every", "3")
    expected = run(*few, "--control-every", "3")
    for arm, other in zip(arms, expected, strict=True):
        assert arm["texts"] == (8 if arm["exact"] else 5)
        assert 2 * (12 - 8) <= arm["timed_tokens"] < 2 * 12
        for name in exact_texts.COUNTS:
            assert arm[name] == other[name]

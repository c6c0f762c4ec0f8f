"""The program that counts the texts which a draft changes."""

import importlib
import json
import sys
from pathlib import Path

import pytest

SCRIPTS = str(Path(__file__).parents[2] / "scripts")
sys.path.insert(0, SCRIPTS)
exact_texts = importlib.import_module("bench.exact_texts")
sys.path.remove(SCRIPTS)


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
    options = ["--shape", shape, "--texts", "2", "--tokens", "12", "--layers", "2"]
    found = exact_texts.main([*options, "--json", "--drafts", *drafts])
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(found))
    arms = found["arms"]
    assert len(arms) == 2 * 2 * (1 + len(drafts))
    for arm in arms:
        assert arm["texts"] == 2
        assert arm["tokens"] == 24
        assert arm["speed"] > 0
        assert (arm["drafted"] > 0) == (arm["draft"] not in (None, "lookup"))
        if arm["exact"] == 8:
            assert arm["different"] == arm["other_probabilities"] == 0

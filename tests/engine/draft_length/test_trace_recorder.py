"""Rounds replayed from a recorded trace equal those of a generation with drafts."""

import json
import re
from pathlib import Path
from typing import Any

import draft_length
import mlx.core as mx
import numpy as np
import pytest
import traces
from typer.testing import CliRunner

from bench.replays.replay import (
    Machine,
    Replayed,
    judged,
    machines_of,
    replay,
    texts_of,
)
from mlx_speculation import LookupDraft, Sampling, SpeculativeGenerator
from mlx_speculation.engine.draft_length.base import FixedDraftLength
from support.draft_length import TRACES
from support.models.chat_folders import chat_folder
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer
from support.scripts import PROMPTS, save_tiny

PROMPT = [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7]
TOKENS = 20


def recorded(draft: Any, sampling: Sampling) -> tuple[Any, dict[str, np.ndarray]]:
    """Return a tiny target, and the arrays of one text, named as in a trace file."""
    model = build("llama")
    usual = SpeculativeGenerator(model, byte_tokenizer(), draft=draft)
    source = traces.Recorded(usual._setup.draft)  # type: ignore[arg-type]
    generator = SpeculativeGenerator(model, byte_tokenizer(), draft=source)
    text = traces.record(generator, source, PROMPT, TOKENS, sampling)
    text["context"] = np.array(len(PROMPT))
    return model, {f"tiny-pair/all/{key}": one[None] for key, one in text.items()}


@pytest.mark.parametrize(
    ("kind", "temperature"),
    [
        ("lookup", 0.0),
        ("other", 0.8),
        pytest.param("lookup", 0.8, marks=pytest.mark.slow),
        pytest.param("same", 0.8, marks=pytest.mark.slow),
    ],
)
def test_a_replay_has_the_rounds_of_a_generation(kind: str, temperature: float) -> None:
    sampling = Sampling(temperature=temperature, seed=3)
    draft: Any = build("llama", seed=int(kind == "other"))
    if kind == "lookup":
        plain = SpeculativeGenerator(build("llama"), byte_tokenizer())
        text = plain.generate(PROMPT, max_tokens=TOKENS, sampling=sampling).tokens
        noisy = [t if i % 7 else (t + 1) % 256 for i, t in enumerate(text)]
        draft = LookupDraft(corpus=[PROMPT + noisy], history=0)
    model, arrays = recorded(draft, sampling)
    (trace,) = texts_of(arrays, ["tiny-pair"])["all"]
    assert len(trace) == TOKENS
    generator = SpeculativeGenerator(model, byte_tokenizer(), draft=draft)
    accepted, behind = 0, 0
    for length in (1, 2, 5, 12) if kind == "lookup" else (2, 5):
        stream = generator.stream(
            PROMPT,
            max_tokens=TOKENS,
            sampling=sampling,
            stop_tokens=(),
            draft_length=length,
            explain=True,
        )
        for _ in stream:
            pass
        replayed = Replayed(decisions=[])
        replay(FixedDraftLength(length), Machine([[1.0] * 17]), trace, replayed)
        outcomes = [outcome for _, outcome in stream.decisions]
        noted, expected = (
            [(o.drafted, o.accepted, o.behind, o.ahead) for o in each]
            for each in ([o for _, o in replayed.decisions or []], outcomes)
        )
        assert noted == expected
        accepted += stream.stats.accepted
        behind += sum(o.drafted > o.accepted > 0 and o.behind for o in outcomes)
    assert accepted > 0 or kind == "other"
    assert behind > 0 or kind != "lookup"


def test_a_model_is_right_as_long_as_it_chooses_as_the_target() -> None:
    _, arrays = recorded(build("llama"), Sampling())
    right = arrays["tiny-pair/all/right"][0]
    assert right.tolist() == [min(15, TOKENS + 2 - n) for n in range(TOKENS)]
    assert (arrays["tiny-pair/all/found"] == 15).all()


def test_a_file_is_made_and_added_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(traces, "ROUNDS", 2)
    monkeypatch.setattr(traces, "PLAIN_ROUNDS", 2)
    monkeypatch.setattr(mx, "set_default_device", lambda _: None)
    questions = tmp_path / "questions.jsonl"
    rows = [{"turns": [f"Say {n} again."], "category": "qa"} for n in range(3)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    folder, out = chat_folder(tmp_path / "model"), tmp_path / "traces.npz"

    def record(*more: str) -> dict[str, np.ndarray]:
        command = [str(out), "--name", "tiny-lookup", "--model", str(folder)]
        command += ["--prompts", str(questions), "--tokens", "30", *more]
        monkeypatch.setattr("sys.argv", ["traces.py", *command])
        traces.main()
        return dict(np.load(out))

    first = record("--per-group", "1")
    both = record("--per-group", "2", "--first", "1")
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["name"] == "tiny-lookup"
    assert both["tiny-lookup/costs"].tolist() == first["tiny-lookup/costs"].tolist()
    assert both["tiny-lookup/costs"][0] == 1.0
    assert both["tiny-lookup/qa/right"].shape == (3, 30)
    for key in ("right", "found", "tokens", "context"):
        name = f"tiny-lookup/qa/{key}"
        assert both[name][:1].tolist() == first[name].tolist()


def printed(*options: str) -> tuple[list[str], list[dict[str, Any]]]:
    done = CliRunner().invoke(
        draft_length.app, [*options, "--blas", "stock"], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    rounds = [line for line in lines if re.match(r" +\d+ \d+ of \d+ in ", line)]
    return rounds, json.loads(lines[-1])["results"]


@pytest.mark.usefixtures("measured")
def test_a_command_prints_what_was_known_and_chosen_of_a_live_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.prompts.demo_prompts", lambda: PROMPTS)
    folder = str(save_tiny(tmp_path / "tiny"))
    rounds, rows = printed(
        *("--explain", "--target", folder, "--draft-model", folder, "--tokens", "30"),
        *("--draft", "model", "--group", "code", "--prompts", "2"),
    )
    (row,) = rows
    assert row["rounds"] == len(rounds)
    assert sum(" 0 of 0 in " not in line for line in rounds) == row["drafts"]
    assert any("(measure)" in line for line in rounds)
    assert any(re.search(r"0: 1.00 in [\d.]+ ms .*credit", line) for line in rounds)


@pytest.mark.usefixtures("measured")
def test_the_same_command_replays_and_prints_recorded_traces() -> None:
    options = ["--traces", str(TRACES), "--draft", "hybrid-lookup+hybrid-mtp"]
    options += ["--machine", "h100", "--tokens", "50"]
    rounds, rows = printed(*options, "--explain")
    assert all(": draft " in line or "; draft " in line for line in rounds)
    again, same = printed(*options)
    assert rows == same
    assert not again
    assert [row["group"] for row in rows] == ["code", "prose", "edit"]
    recorded_traces = dict(np.load(TRACES))
    pair = ["hybrid-lookup", "hybrid-mtp"]
    verdicts = judged(
        recorded_traces, pair, machines_of(recorded_traces, pair)["h100"], 50
    )
    assert [row["x_best"] for row in rows] == [each.over_best for each in verdicts]
    wrong = CliRunner().invoke(
        draft_length.app, [*options, "--draft", "none-lookup", "--blas", "stock"]
    )
    assert wrong.exit_code == 2
    assert "'none-lookup'" in wrong.output

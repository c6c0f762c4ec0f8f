"""Acceptance measured on recorded text is that of rounds.

speculation.json names a draft that pays.
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_speculation import SpeculativeGenerator
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import load
from mlx_speculation.training.acceptance_check import (
    ROUND,
    check_acceptance,
    lookup_acceptance,
)
from mlx_speculation.training.data.answers import write_answers
from mlx_speculation.training.data.dialogues import Dialogue
from mlx_speculation.training.kinds.small_model import SmallModelTrainee
from mlx_speculation.training.output.speeds import pair_with
from mlx_speculation.training.teacher import TargetModel
from support.models.chat_folders import chat_folder

PROMPTS = ([1, 2, 3], [70, 71], [9, 9, 9, 9, 200])


def spoken(model: Any, prompt: list[int], temperature: float) -> Dialogue:
    [answer] = write_answers(
        model, [prompt], most=40, temperature=temperature, ends=[], seed=4
    )
    tokens = np.array([*prompt, *answer], np.uint32)
    counts = np.arange(len(tokens)) >= len(prompt)
    return Dialogue(tokens, counts, True, False, temperature)


@pytest.mark.openblas
@pytest.mark.parametrize("same", [True, False])
def test_greedy_text_accepts_what_rounds_accept(same: bool, tmp_path: Path) -> None:
    """All drafts of a model with the target's weights are accepted."""
    folder = chat_folder(tmp_path / "target")
    draft = chat_folder(tmp_path / "draft", seed=0 if same else 1)
    model, tokenizer = load(folder)
    trainee = SmallModelTrainee(model, tokenizer, folder, draft, seed=0)
    dialogues = [spoken(model, prompt, 0.0) for prompt in PROMPTS]
    teacher = TargetModel(model, trainee)
    acceptance = check_acceptance(trainee, teacher, dialogues, 200)
    assert acceptance.keys() == {"greedy"}
    generator = SpeculativeGenerator(
        model, tokenizer, draft=load(draft)[0], draft_length=ROUND
    )
    stats = [
        generator.generate(list(map(int, prompt)), max_tokens=41).stats
        for prompt in PROMPTS
    ]
    accepted = sum(each.accepted for each in stats)
    length = 1 + accepted / sum(each.drafts for each in stats)
    assert acceptance["greedy"].length == pytest.approx(length, abs=0.1)
    assert (acceptance["greedy"].positions == (1.0,) * ROUND) == same


def test_sampled_text_accepts_the_overlap_of_probabilities(tmp_path: Path) -> None:
    folder = chat_folder(tmp_path / "target")
    model, tokenizer = load(folder)
    draft = chat_folder(tmp_path / "draft", seed=1)
    trainee = SmallModelTrainee(model, tokenizer, folder, draft, seed=0)
    dialogue = spoken(model, [1, 2, 3], 0.8)
    teacher = TargetModel(model, trainee)
    acceptance = check_acceptance(trainee, teacher, [dialogue], 200)
    tokens = mx.array(dialogue.tokens)[None]
    small: Any = trainee.module
    probs = [
        np.array(mx.softmax(each(tokens)[0] / 0.8, axis=-1)) for each in (model, small)
    ]
    overlap = np.minimum(*probs).sum(-1)
    # The first token that can be drafted is the second of the answer.
    begin, end = 3, len(dialogue.tokens) - ROUND
    expected = np.mean(overlap[begin:end])
    assert acceptance["sampled"].positions[0] == pytest.approx(expected, abs=1e-3)


def test_answers_that_are_too_short_to_draft_are_refused(tmp_path: Path) -> None:
    folder = chat_folder(tmp_path / "target")
    model, tokenizer = load(folder)
    trainee = SmallModelTrainee(model, tokenizer, folder, folder, seed=0)
    tokens = np.array([1, 2, 3, 4], np.uint32)
    short = Dialogue(tokens, np.arange(4) >= 3, True, False, 0.0)
    with pytest.raises(InvalidRequestError, match=r"1 held-out answers .* 4 tokens"):
        check_acceptance(trainee, TargetModel(model, trainee), [short], 200)


def test_a_lookup_is_right_where_text_repeats() -> None:
    repeated = np.array([*range(8)] * 6, np.uint32)
    dialogue = Dialogue(repeated, np.arange(48) >= 8, True, False, 0.0)
    acceptance = lookup_acceptance([dialogue])["greedy"]
    assert acceptance.length > 3
    varied = Dialogue(
        np.arange(48, dtype=np.uint32), np.arange(48) >= 8, True, False, 0.8
    )
    assert lookup_acceptance([varied])["sampled"].length == 1


def test_a_draft_that_pays_is_named_once(tmp_path: Path) -> None:
    target = chat_folder(tmp_path / "target")
    inside, beside = target / "head", tmp_path / "head"
    far = tmp_path / "other" / "head"
    for each in (inside, beside, far):
        each.mkdir(parents=True)
    file = target / "speculation.json"
    assert "names it" in pair_with(target, beside, "eagle")
    assert json.loads(file.read_text()) == {"draft": "../head", "kind": "eagle"}
    assert "left as it is" in pair_with(target, inside, "eagle")
    file.unlink()
    pair_with(target, inside, "mtp")
    assert json.loads(file.read_text()) == {"draft": "head", "kind": "mtp"}
    file.unlink()
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    elsewhere.mkdir()
    assert "move the folder" in pair_with(target, elsewhere, "eagle")
    assert not file.exists()

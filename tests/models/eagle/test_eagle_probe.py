"""Layers that an EAGLE-3 head reads: scores of both ways to count, and refusals."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_speculation import demo_models, load
from mlx_speculation.engine import EagleDraft
from mlx_speculation.errors import ConventionError, DraftNotice
from mlx_speculation.models import HiddenStates
from mlx_speculation.models.checkpoints.layer_readings import LayerReadings
from mlx_speculation.models.checkpoints.probe_text import OwnText
from mlx_speculation.models.eagle import (
    AFTER_NORM,
    layer_readings,
    load_eagle_head,
)
from mlx_speculation.models.eagle.probe import EagleProbe, probe_layers
from support.models.eagle_checkpoints import write_eagle
from support.models.tiny_models import build

STARTS = [[5, 9, 200, 31, 7], [77, 3, 12, 140, 90]]
IDS = "eagle_aux_hidden_state_layer_ids"


def readings_of(folder: Path) -> LayerReadings:
    """Return the possible layers for a head's config.json and a target of 4 layers."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return layer_readings(config, 4)


def test_proposals_are_those_of_a_round_that_begins_there(tmp_path: Path) -> None:
    """The probe guesses what a round that begins at the same position proposes."""
    model = build("llama", layers=4)
    head, layers = load_eagle_head(write_eagle(tmp_path, "specforge"), model)
    taps = HiddenStates(model, layers=layers, before_norm=True, after_norm=True)
    text = OwnText.of(model, taps, STARTS, steps=12)
    seen: list[mx.array] = []
    scored = text.score

    class Text:
        """The text; it also records the logits to score."""

        tokens, written, target_log_probs = (
            text.tokens,
            text.written,
            text.target_log_probs,
        )

        def score(self, logits: mx.array, first: int) -> Any:
            seen.append(logits)
            assert first == text.written
            return scored(logits, first)

    trial = EagleProbe(head, model, taps, Text())  # type: ignore[arg-type]
    trial.score(layers)
    eagle = EagleDraft(model, head, layers).eagle
    assert head.ids is not None
    for place in (text.written, 11, text.positions - 1):
        known = text.tokens[1:, :place]
        with taps.collect() as states:
            model(known[:, :-1])
        out = eagle.rows(eagle.states(states), known[:, 1:], head.new_caches()[0])
        row = np.array(seen[0][1, place - text.written])
        assert np.allclose(row[np.array(head.ids)], out.logits[0, -1], atol=1e-4)
        assert np.isinf(row).sum() == 256 - head.ids.size


def test_readings_are_those_that_the_target_has() -> None:
    def read(config: dict[str, Any]) -> list[tuple[int, ...]]:
        return list(layer_readings(config, 8).layers)

    assert read({})[:2] == [(1, 3, 4), (2, 4, 5)]
    assert read({IDS: [1, 2, 4]}) == [(0, 1, 3), (1, 2, 4)]
    assert read({IDS: [1, 2, 8]}) == [(0, 1, 7)]
    assert read({"eagle_config": {IDS: [1, 2, 4]}}) == [(1, 2, 4), (0, 1, 3)]


def test_a_random_head_is_refused_unless_its_layers_are_named(tmp_path: Path) -> None:
    model = build("llama", layers=4)
    head, _ = load_eagle_head(write_eagle(tmp_path, "specforge"), model)
    with pytest.raises(ConventionError, match=r"chance.*'layers' \[0, 1, 3\] agrees"):
        probe_layers(head, model, readings_of(tmp_path), STARTS)


def test_the_last_state_is_read_before_or_after_the_norm(tmp_path: Path) -> None:
    """Files do not say which of the two; the refusal names both."""
    folder, model = write_eagle(tmp_path, "last state"), build("llama", layers=4)
    head, layers = load_eagle_head(folder, model)
    assert layers == (AFTER_NORM,)
    readings = readings_of(folder)
    assert list(readings.layers) == [(AFTER_NORM,), (3,)]
    assert not readings.notice((AFTER_NORM,), None)
    with pytest.raises(
        ConventionError, match=r"'tuple' after the norm .*'layers' \[3\]"
    ):
        probe_layers(head, model, readings, STARTS)
    named = EagleDraft.from_folder(folder, model, layer_ids="layers")
    assert named.eagle.layers == (3,)


@pytest.mark.slow
def test_the_trained_head_is_read_right_wherever_its_list_stands(
    tmp_path: Path,
) -> None:
    """Outside of eagle_config, where vLLM writes the list, layers count from 1."""
    model, tokenizer = load(demo_models()["dense"])
    folder = demo_models()["eagle"]
    drafter = EagleDraft.from_folder(folder, model, tokenizer=tokenizer)
    assert drafter.eagle.layers == (1, 3, 5)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    # The list moves to the top level, where it means layers 0, 2 and 4.
    wrong = {**config, IDS: config.pop("eagle_config")[IDS]}
    del wrong["eagle_config"]
    (tmp_path / "config.json").write_text(json.dumps(wrong), encoding="utf-8")
    assert EagleDraft.from_folder(tmp_path, model).eagle.layers == (0, 2, 4)
    with pytest.warns(DraftNotice, match=r"reads layers \[1, 3, 5\] \(it agrees"):
        drafter = EagleDraft.from_folder(tmp_path, model, tokenizer=tokenizer)
    assert drafter.eagle.layers == (1, 3, 5)

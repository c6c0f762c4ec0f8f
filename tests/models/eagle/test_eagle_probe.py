"""Layers that an EAGLE-3 head reads: both ways to count them, and refusals."""

import json
from pathlib import Path

import pytest

from mlx_speculation import demo_models, load
from mlx_speculation.engine import EagleDraft
from mlx_speculation.errors import ConventionError, DraftNotice
from mlx_speculation.models.eagle import AFTER_NORM, load_eagle_head
from support.models.eagle_checkpoints import write_eagle
from support.models.tiny_models import build

STARTS = [[5, 9, 200, 31, 7], [77, 3, 12, 140, 90]]
IDS = "eagle_aux_hidden_state_layer_ids"


def test_a_random_head_is_refused_unless_its_layers_are_named(tmp_path: Path) -> None:
    folder, model = write_eagle(tmp_path, "specforge"), build("llama", layers=4)
    with pytest.raises(ConventionError, match=r"chance.*'layers' \[0, 1, 3\] agrees"):
        load_eagle_head(folder, model, starts=STARTS)
    load_eagle_head(folder, model, layer_ids="layers", starts=STARTS)


def test_the_last_state_is_read_before_or_after_the_norm(tmp_path: Path) -> None:
    """Files do not say whether a head reads the state before or after the norm."""
    folder, model = write_eagle(tmp_path, "last state"), build("llama", layers=4)
    loaded = load_eagle_head(folder, model)
    assert (loaded.layers, loaded.notice) == ((AFTER_NORM,), "")
    with pytest.raises(
        ConventionError, match=r"'tuple' after the norm .*'layers' \[3\]"
    ):
        load_eagle_head(folder, model, starts=STARTS)
    named = EagleDraft.from_folder(folder, model, layer_ids="layers")
    assert named.eagle.layers == (3,)


@pytest.mark.slow
def test_the_trained_head_is_read_right_wherever_its_list_stands(
    tmp_path: Path,
) -> None:
    model, tokenizer = load(demo_models()["dense"])
    folder = demo_models()["eagle"]
    drafter = EagleDraft.from_folder(folder, model, tokenizer=tokenizer)
    assert drafter.eagle.layers == (1, 3, 5)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    # At the top level, where vLLM writes it, the list [1, 3, 5] counts layers from 1.
    wrong = {**config, IDS: config.pop("eagle_config")[IDS]}
    del wrong["eagle_config"]
    (tmp_path / "config.json").write_text(json.dumps(wrong), encoding="utf-8")
    assert EagleDraft.from_folder(tmp_path, model).eagle.layers == (0, 2, 4)
    with pytest.warns(DraftNotice, match=r"\[1, 3, 5\] are read \(the draft agrees"):
        drafter = EagleDraft.from_folder(tmp_path, model, tokenizer=tokenizer)
    assert drafter.eagle.layers == (1, 3, 5)

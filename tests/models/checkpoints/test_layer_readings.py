"""The target's layers that a drafter reads: listed in config.json, or guessed."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models.checkpoints.joined_head import features_of
from mlx_speculation.models.checkpoints.layer_readings import Layers, stated_list
from mlx_speculation.models.checkpoints.probe import Score
from mlx_speculation.models.dflash.config import layer_readings as of_blocks
from mlx_speculation.models.eagle.config import layer_readings as of_eagle
from mlx_speculation.models.eagle.load import load_eagle_head
from support.models.eagle_checkpoints import write_eagle
from support.models.tiny_models import build

IDS, OWN = "eagle_aux_hidden_state_layer_ids", "target_layer_ids"


@pytest.mark.parametrize(
    ("config", "place", "expected"),
    [
        ({IDS: [2, 4, 6]}, IDS, (1, 3, 5)),
        ({OWN: [1, 3, 5]}, OWN, (1, 3, 5)),
        ({"eagle_config": {IDS: [1, 3, 5]}}, f"eagle_config.{IDS}", (1, 3, 5)),
        ({"dflash_config": {OWN: [1, 3, 5]}}, f"dflash_config.{OWN}", (1, 3, 5)),
        ({"text_config": {OWN: [1, 3, 5]}}, f"text_config.{OWN}", (1, 3, 5)),
        ({"text_config": {IDS: [2, 4, 6]}}, f"text_config.{IDS}", (1, 3, 5)),
        (
            {"text_config": {"eagle_config": {IDS: [1, 3, 5]}}},
            f"text_config.eagle_config.{IDS}",
            (1, 3, 5),
        ),
        (
            {"transformer_layer_config": {"aux_hidden_state_layer_ids": [2, 4, 6]}},
            "transformer_layer_config.aux_hidden_state_layer_ids",
            (1, 3, 5),
        ),
        ({OWN: [1, 3, 5], IDS: [2, 4, 6]}, OWN, (1, 3, 5)),
        # Of two equal lists, the one in eagle_config decides how layers are counted.
        (
            {IDS: [1, 3, 5], "eagle_config": {IDS: [1, 3, 5]}},
            f"eagle_config.{IDS}",
            (1, 3, 5),
        ),
    ],
)
def test_lists_of_every_place_are_read(
    config: dict[str, Any], place: str, expected: Layers
) -> None:
    stated = stated_list(config, "head")
    assert stated is not None
    assert (stated.place, stated.layers()) == (place, expected)
    assert of_eagle(config, 12, [3]).usual == expected
    assert of_blocks(config, 12, [3]).usual == expected


def test_a_list_in_another_order_leaves_nothing_to_say() -> None:
    readings = of_eagle({"eagle_config": {IDS: [28, 1, 15]}}, 32, [3])
    assert readings.usual == (1, 15, 28)
    assert not readings.notice((1, 15, 28), None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {OWN: [0, 1, 3], IDS: [0, 1, 3]},
            rf"{OWN} \[0, 1, 3\], which counts layers from 0 and {IDS} \[0, 1, 3\], "
            "which counts the embedding as 0",
        ),
        (
            {"eagle_config": {IDS: [1, 3, 5]}, IDS: [3, 5, 7]},
            rf"eagle_config.{IDS} \[1, 3, 5\].* {IDS} \[3, 5, 7\]",
        ),
        (
            {"dflash_config": {OWN: [1, 3]}, "text_config": {OWN: [1, 4]}},
            rf"dflash_config.{OWN} \[1, 3\].* text_config.{OWN} \[1, 4\]",
        ),
        ({"text_config": {OWN: "1, 3"}}, f"text_config.{OWN} '1, 3', which has to"),
    ],
)
def test_lists_that_do_not_agree_are_named(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelFolderError, match=message):
        stated_list(config, "head")


def test_a_list_that_cannot_count_from_0_counts_from_1() -> None:
    """If layers are counted from 0, a target of 6 layers has no layer 6."""
    for read, config in (
        (of_eagle, {"eagle_config": {IDS: [2, 4, 6]}}),
        (of_blocks, {"dflash_config": {OWN: [2, 4, 6]}}),
        (of_blocks, {"text_config": {OWN: [2, 4, 6]}}),
    ):
        values = read(config, 6, [3])
        assert list(values.layers) == [(1, 3, 5)]
        assert "layers [1, 3, 5] are read (not probed)" in values.notice(
            (1, 3, 5), None
        )
        with pytest.raises(ModelFolderError, match=r"layers \[2, 4, 6\].* from 0 to 5"):
            read(config, 6, [3], counts="layers")


@pytest.mark.parametrize(
    ("read", "trunk", "count", "usual"),
    [
        (of_eagle, 30, 3, [(1, 14, 26), (2, 15, 27)]),
        (of_eagle, 32, 3, [(1, 15, 28), (2, 16, 29)]),
        (of_eagle, 36, 5, [(1, 9, 17, 25, 33)]),
        (of_eagle, 6, 3, [(1, 2, 3), (0, 2, 5)]),
        (of_blocks, 36, 5, [(1, 9, 17, 25, 33)]),
        (of_blocks, 8, 3, [(1, 3, 5), (1, 3, 4)]),
        (of_blocks, 4, 3, [(0, 2, 3)]),
        (of_blocks, 4, 4, [(0, 1, 2, 3)]),
    ],
)
def test_layers_that_are_not_listed_are_guessed(
    read: Any, trunk: int, count: int, usual: list[Layers]
) -> None:
    values = read({}, trunk, [count])
    assert values.guessed
    assert list(values.layers)[: len(usual)] == usual
    assert all(len(set(each)) == count for each in values.layers)
    said = f"Layers {list(usual[0])} are read, the usual"
    assert said in values.notice(usual[0], None)


def test_guessed_layers_are_said_with_their_score() -> None:
    readings = of_eagle({}, 30, [3])
    assert (2, 15, 27) in readings.layers
    score = Score(np.zeros(30), 1.0, 0.0)
    said = readings.notice((2, 15, 27), score)
    assert "[2, 15, 27] are read, found by a probe (the draft agrees 100%" in said


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_a_packed_projection_shows_how_many_layers_it_takes(bits: int) -> None:
    packed = mx.quantize(mx.zeros((64, 3 * 576)), group_size=64, bits=bits)
    weights = {"fc.weight": packed[0], "fc.scales": packed[1]}
    said = {"quantization": {"group_size": 64, "bits": bits}}
    assert features_of(weights, said, "head", 576) == (3,)
    for unclear in ({}, {"quantization": {"bits": [4]}}, {"quantization": 4}):
        assert 3 in features_of(weights, unclear, "head", 576)
    mixed = {"quantization": {"bits": 6, "fc": {"group_size": 64, "bits": bits}}}
    assert features_of(weights, mixed, "head", 576) == (3,)
    with pytest.raises(ModelFolderError, match="the target's hidden size 500"):
        features_of(weights, said, "head", 500)


def test_a_packed_head_without_a_list_is_read_by_its_width(tmp_path: Path) -> None:
    """Unless config.json gives the bits, 2 layers in 8 bits look like 4 in 4 bits."""
    model = build("llama", layers=8)
    for taps, usual in ((3, (1, 3, 4)), (2, (1, 5))):
        folder = write_eagle(tmp_path / str(taps), "authors", (0, 1, 3)[:taps])
        file = str(folder / "model.safetensors")
        weights: Any = mx.load(file)
        named = ("fc.weight", "fc.scales", "fc.biases")
        packed = mx.quantize(weights.pop("fc.weight"), group_size=64, bits=8)
        weights |= dict(zip(named, packed, strict=True))
        mx.eval(list(weights.values()))
        mx.save_safetensors(file, weights)
        if taps == 2:
            with pytest.raises(ModelFolderError, match="takes 2 or 4 of the target's"):
                load_eagle_head(folder, model)
            said = {"quantization": {"group_size": 64, "bits": 8}}
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            text = json.dumps(config | said)
            (folder / "config.json").write_text(text, encoding="utf-8")
        assert load_eagle_head(folder, model).layers == usual

"""Reading EAGLE-3 folders: dialects, layers of the target, and refusals."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_speculation.engine import PEagleDraft
from mlx_speculation.engine.drafters.registry import draft_folder
from mlx_speculation.errors import InvalidRequestError, ModelFolderError
from mlx_speculation.models.eagle import (
    AFTER_NORM,
    is_eagle,
    load_eagle_head,
)
from mlx_speculation.models.eagle.config import layer_readings
from support.models.eagle_checkpoints import (
    DIALECTS,
    DRAFT_VOCAB,
    PARALLEL,
    VOCAB,
    draft_ids,
    write_eagle,
)
from support.models.tiny_models import build

IDS = "eagle_aux_hidden_state_layer_ids"


def changed(folder: Path, **keys: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(config | keys), encoding="utf-8")


def change_tensors(folder: Path, **tensors: mx.array | None) -> None:
    """Change tensors, or remove them by None; names have __ in place of dots."""
    file = folder / "model.safetensors"
    loaded: Any = mx.load(str(file))
    loaded = dict(loaded)
    for name, value in tensors.items():
        loaded.pop(name.replace("__", "."), None)
        if value is not None:
            loaded[name.replace("__", ".")] = value
    mx.eval(list(loaded.values()))
    mx.save_safetensors(str(file), loaded)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_is_known_and_read(dialect: str, tmp_path: Path) -> None:
    write_eagle(tmp_path, dialect)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert is_eagle(config)
    head, layers, _ = load_eagle_head(tmp_path, build("qwen3_5", layers=8))
    usual = {"authors": (1, 3, 4), "last state": (AFTER_NORM,)}
    assert layers == usual.get(dialect, (0, 1, 3))
    assert len(head.new_caches()[0]) == DIALECTS[dialect].layers
    assert ("fc" in head) == (dialect != "last state")
    reduced = DIALECTS[dialect].reduced
    assert (None if head.ids is None else head.ids.tolist()) == (
        draft_ids() if reduced else None
    )
    assert ("embed_tokens" in head) == DIALECTS[dialect].embedding
    has_head = reduced or DIALECTS[dialect].output or dialect == "tied"
    assert ("lm_head" in head) == has_head


@pytest.mark.parametrize("dialect", PARALLEL)
def test_every_parallel_dialect_is_known_and_read(dialect: str, tmp_path: Path) -> None:
    folder = write_eagle(tmp_path, dialect)
    assert draft_folder(folder) == (folder, PEagleDraft)
    model = build("llama", layers=4)
    head, layers, _ = load_eagle_head(folder, model, kind="peagle")
    assert layers == (0, 1, 3)
    assert head.depth == (5 if dialect == "peagle" else None)
    assert len(head.new_caches()[0]) == PARALLEL[dialect].layers
    assert head.mask_hidden.shape == (192,)
    with pytest.raises(ModelFolderError, match=r"EAGLE-3 head, .* of a P-EAGLE head"):
        load_eagle_head(folder, model)


@pytest.mark.parametrize(
    ("keys", "tensors", "message"),
    [
        ({"ptd_token_id": None}, {}, "no mask_token_id and no ptd_token_id, but masks"),
        ({"ptd_token_id": 256}, {}, "mask_token_id 256, but there are only 256"),
        ({}, {"mask_hidden": mx.zeros((1, 128))}, "128 numbers, but .* input size 192"),
    ],
)
def test_masks_that_do_not_fit_are_refused(
    keys: dict[str, Any], tensors: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write_eagle(tmp_path, "aws")
    changed(folder, **keys)
    change_tensors(folder, **tensors)
    with pytest.raises(ModelFolderError, match=message):
        load_eagle_head(folder, build("llama", layers=4), kind="peagle")


def test_later_layers_may_have_another_name_for_their_first_norm(
    tmp_path: Path,
) -> None:
    folder, model = write_eagle(tmp_path, "several layers"), build("llama", layers=4)
    before = load_eagle_head(folder, model).head.later[0].input_layernorm.weight
    name = "layers__1__{}__weight"
    change_tensors(
        folder,
        **{name.format("input_layernorm"): None, name.format("hidden_norm"): before},
    )
    after = load_eagle_head(folder, model).head.later[0].input_layernorm.weight
    assert mx.array_equal(before, after)


def test_models_and_other_drafts_are_no_heads() -> None:
    assert not is_eagle({"architectures": ["LlamaForCausalLM"], "vocab_size": 5})
    assert not is_eagle({"architectures": ["DFlashDraftModel"]})
    assert not is_eagle({})


@pytest.mark.parametrize(
    ("config", "reading", "expected"),
    [
        ({}, None, (1, 15, 28)),
        ({}, "layers", (1, 15, 28)),
        ({IDS: [2, 16, 29]}, None, (1, 15, 28)),
        ({IDS: [1, 15, 28]}, "layers", (1, 15, 28)),
        ({"eagle_config": {IDS: [1, 15, 28]}}, None, (1, 15, 28)),
        ({"eagle_config": {IDS: [2, 16, 29]}}, "tuple", (1, 15, 28)),
        ({"eagle_config": {IDS: [28, 1, 15]}}, None, (1, 15, 28)),
        ({IDS: [32]}, None, (31,)),
        ({IDS: [0, 2]}, None, (-1, 1)),
        ({"target_layer_ids": [1, 9, 17, 25, 30]}, None, (1, 9, 17, 25, 30)),
        ({"eagle_config": {"use_aux_hidden_state": False}}, None, (AFTER_NORM,)),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "layers", (31,)),
    ],
)
def test_the_place_of_the_list_says_which_layers_are_meant(
    config: dict[str, Any], reading: Any, expected: tuple[int, ...]
) -> None:
    assert layer_readings(config, 32, (), reading).usual == expected


def test_layers_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ModelFolderError, match=r"layers \[-2, 1\] of the target"):
        layer_readings({IDS: [-1, 2]}, 32)
    with pytest.raises(ModelFolderError, match="this target's layers go from 0 to 7"):
        layer_readings({"eagle_config": {IDS: [1, 3, 9]}}, 8)
    with pytest.raises(ModelFolderError, match="a list of whole numbers"):
        layer_readings({IDS: "1,2"}, 8)
    with pytest.raises(InvalidRequestError, match="layer_ids is 'indices'"):
        layer_readings({}, 8, (), "indices")  # type: ignore[arg-type]


def test_a_quantized_head_is_read_by_its_shapes(tmp_path: Path) -> None:
    write_eagle(tmp_path, "specforge")
    model = build("llama", layers=4)
    full = load_eagle_head(tmp_path, model).head
    name = "midlayer.mlp.down_proj"
    packed: Any = mx.quantize(full.midlayer.mlp.down_proj.weight, group_size=32, bits=8)
    words, scales, biases = packed
    change_tensors(
        tmp_path,
        **{
            f"{name}.weight".replace(".", "__"): words,
            f"{name}.scales".replace(".", "__"): scales,
            f"{name}.biases".replace(".", "__"): biases,
        },
    )
    loaded = load_eagle_head(tmp_path, model).head
    weight = loaded.midlayer.mlp.down_proj.weight
    expected = mx.dequantize(words, scales, biases, group_size=32, bits=8)
    assert mx.array_equal(weight, expected)
    assert not isinstance(loaded.midlayer.mlp.down_proj, nn.QuantizedLinear)


SHIFTS = np.array(draft_ids()) - np.arange(DRAFT_VOCAB)
WRONG_TENSORS: list[tuple[dict[str, Any], str]] = [
    ({"norm__weight": None}, "lacks norm.weight"),
    ({"mask_hidden": mx.zeros(64)}, "P-EAGLE"),
    ({"other__weight": mx.zeros(64)}, "not known: other.weight"),
    ({"d2t": None, "t2d": None}, "96 columns of logits and no d2t"),
    ({"d2t": mx.array(SHIFTS + VOCAB)}, "an id of its own below 256"),
    ({"d2t": mx.array(SHIFTS[0] - np.arange(DRAFT_VOCAB))}, "to 1 ids"),
    ({"t2d": mx.zeros(VOCAB, mx.bool_)}, "t2d of the EAGLE-3 head has 0 ids"),
    ({"d2t": mx.array(SHIFTS[:90]), "t2d": None}, "a d2t of 90"),
    ({"fc__weight": mx.zeros((64, 128))}, "takes 2 layers .* names 3"),
    ({"norm__weight": mx.zeros(63)}, "do not follow from config.json: norm.weight"),
]


@pytest.mark.parametrize(("tensors", "message"), WRONG_TENSORS)
def test_tensors_that_do_not_fit_are_refused(
    tensors: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_eagle(tmp_path, "specforge")
    change_tensors(tmp_path, **tensors)
    with pytest.raises(ModelFolderError, match=message):
        load_eagle_head(tmp_path, build("llama", layers=4))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_hidden_layers": 2}, "lacks layers.1.input_layernorm"),
        ({"layer_types": ["linear_attention"]}, "layer_types"),
        ({"kv_lora_rank": 512}, "qk_nope_head_dim None"),
        ({"target_hidden_size": 96}, "target_hidden_size 96"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"draft_vocab_size": 95}, "draft_vocab_size 95, but there are 96"),
        ({"norm_before_fc": True}, "neither input_norm nor fc_norm"),
        ({"norm_output": "yes"}, "norm_output 'yes'"),
        ({"hidden_size": 0}, "hidden_size 0"),
        ({"rope_scaling": {"rope_type": "unheard"}}, "unheard"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "takes 3 .* take 1"),
    ],
)
def test_a_config_that_is_not_known_is_refused(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_eagle(tmp_path, "specforge")
    changed(tmp_path, **keys)
    with pytest.raises(ModelFolderError, match=message):
        load_eagle_head(tmp_path, build("llama", layers=4))


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    write_eagle(tmp_path, "specforge")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelFolderError, match=r"has no \*.safetensors"):
        load_eagle_head(tmp_path, build("llama", layers=4))

"""Gemma 4 assistants: settings, loading, and the fit to a target."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_speculation.errors import ModelFolderError, UnsupportedModelError
from mlx_speculation.models.gemma_assistant import (
    Assistant,
    SharedKv,
    is_assistant,
    load_assistant,
)
from mlx_speculation.models.gemma_assistant.config import read_assistant_settings
from support.models.assistant_checkpoints import (
    FULL,
    HEADS,
    SLIDING,
    TARGETS,
    WINDOW,
    config_of,
    make,
    tensors_of,
    write,
)
from support.models.tiny_models import build

TOLERANCE = 1e-4
BACKBONE, VOCAB = 64, 256


@pytest.mark.parametrize("head", HEADS)
def test_a_real_layout_loads_as_it_was_written(tmp_path: Path, head: str) -> None:
    made = make("shared", head)
    write(made, tmp_path)
    assert len(tensors_of(made.assistant)) == {"dense": 48, "centroids": 50}[head]
    assert is_assistant(json.loads((tmp_path / "config.json").read_text()))
    loaded = load_assistant(tmp_path)
    wanted, read = tensors_of(made.assistant), tensors_of(loaded)
    assert wanted.keys() == read.keys()
    assert all(mx.array_equal(wanted[name], read[name]) for name in wanted)


def test_a_second_copy_of_the_embedding_is_left_out(tmp_path: Path) -> None:
    made = make("shared")
    copy = tensors_of(made.assistant)["model.embed_tokens.weight"]
    load_assistant(write(made, tmp_path, **{"lm_head.weight": copy + 0}))


def test_a_packed_assistant_loads(tmp_path: Path) -> None:
    made = make("gemma3")
    packed: Any = Assistant(read_assistant_settings(made.config))
    whole: Any = made.assistant
    packed.update(whole.parameters())
    nn.quantize(packed, group_size=32, bits=8)
    path = tmp_path / "model.safetensors"
    mx.save_safetensors(str(path), tensors_of(packed))
    (tmp_path / "config.json").write_text(json.dumps(made.config), encoding="utf-8")
    loaded = load_assistant(tmp_path)
    for name, value in tensors_of(made.assistant).items():
        assert mx.allclose(value, tensors_of(loaded)[name], atol=0.05), name


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.layers.2.layer_scalar", "lacks layers.2.layer_scalar"),
        ("post_projection.weight", "lacks post_projection.weight"),
        ("model.embed_tokens.weight", "lacks embed_tokens.weight"),
    ],
)
def test_an_assistant_that_is_not_whole_is_refused(
    tmp_path: Path, name: str, said: str
) -> None:
    made = make("shared")
    write(made, tmp_path)
    tensors = tensors_of(made.assistant)
    del tensors[name]
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
    with pytest.raises(ModelFolderError, match=said):
        load_assistant(tmp_path)


@pytest.mark.parametrize(
    ("part", "key", "value", "said"),
    [
        ("", "model_type", "gemma4", "model_type in config.json is 'gemma4'"),
        ("", "backbone_hidden_size", None, "backbone_hidden_size None"),
        ("", "num_centroids", 15, "256 tokens in 15 groups"),
        ("", "centroid_intermediate_top_k", 17, "in 16 groups and reads 17 groups"),
        ("text_config", "layer_types", None, "layer_types None"),
        (
            "text_config",
            "layer_types",
            [FULL, "linear"],
            "a list of 4 entries",
        ),
        ("text_config", "enable_moe_block", True, "enable_moe_block True"),
        ("text_config", "hidden_size_per_layer_input", 8, "per_layer_input 8"),
        ("text_config", "sliding_window", 0, "sliding_window 0"),
    ],
)
def test_a_config_that_is_not_understood_is_refused(
    part: str, key: str, value: Any, said: str
) -> None:
    config = config_of("shared", "centroids")
    (config[part] if part else config)[key] = value
    with pytest.raises(ModelFolderError, match=said):
        read_assistant_settings(config)


@pytest.mark.parametrize("name", ["gemma4_assistant", "gemma4_unified_assistant"])
def test_both_kinds_of_assistants_are_known(name: str) -> None:
    config = {**config_of("shared"), "model_type": name}
    assert is_assistant(config)
    assert read_assistant_settings(config).target_dim == 64
    assert not is_assistant({"model_type": "gemma4"})


def test_files_that_do_not_say_that_all_layers_share_are_read() -> None:
    """Some files have `num_kv_shared_layers` 0, though all layers share their keys."""
    config = config_of("shared", num_kv_shared_layers=0)
    assert read_assistant_settings(config).layers.num_kv_shared_layers == 4


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("shared", {SLIDING: 0, FULL: 1}),
        ("unshared", {SLIDING: 4, FULL: 3}),
        ("gemma3", {SLIDING: 1, FULL: 2}),
    ],
)
def test_the_last_layers_with_keys_of_their_own_are_read(
    name: str, places: dict[str, int]
) -> None:
    made = make(name)
    assert SharedKv(made.target, made.assistant).places == places


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_read_is_the_window_and_the_whole(name: str) -> None:
    made = make(name)
    shared = SharedKv(made.target, made.assistant)
    caches: Any = made.target.make_cache()
    made.target(mx.arange(30)[None], cache=caches)
    for token in (30, 31):
        made.target(mx.array([[token]]), cache=caches)
    for left_out in (0, 1):
        read, stop = shared.read(caches, left_out)
        assert stop == 32 - left_out
        assert read[FULL][0].shape[2] == 32 - left_out
        assert read[SLIDING][0].shape[2] == WINDOW - left_out


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llama", r"sliding_attention layers.*\['KVCache'\]"),
        ("mamba", "sliding_attention layers"),
        ("gpt_oss", "4 heads of size 32, but layer .* keys of size"),
    ],
)
def test_another_target_is_refused(name: str, said: str) -> None:
    assistant = make("unshared").assistant
    if name == "gpt_oss":
        config = config_of("gemma3", head_dim=32)
        assistant = Assistant(read_assistant_settings(config))
    with pytest.raises(UnsupportedModelError, match=said):
        SharedKv(build(name), assistant)

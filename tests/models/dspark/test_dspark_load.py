"""Reading DSpark folders: packagings, options that config.json omits, refusals."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_speculation.errors import InvalidRequestError, ModelFolderError
from mlx_speculation.models.dflash.config import open_readings
from mlx_speculation.models.dspark.config import read_settings
from mlx_speculation.models.dspark.gguf import read_gguf
from mlx_speculation.models.dspark.load import load_dspark
from support.models.block_checkpoints import BLOCK, PACKAGINGS, write_block
from support.models.dflash_checkpoints import VOCAB
from support.models.tiny_models import build

LAYERS = (0, 1, 3)
SPARKS = [name for name, each in PACKAGINGS.items() if each.kind == "dspark"]


@pytest.mark.parametrize("name", SPARKS)
def test_every_packaging_is_read(name: str, tmp_path: Path) -> None:
    packaging = PACKAGINGS[name]
    drafter = load_dspark(write_block(tmp_path, name), build("llama", layers=4))
    head: Any = drafter.head
    assert drafter.layers == LAYERS
    assert head.depth == packaging.depth
    assert head.settings.anchor == ("samples" if head.depth == BLOCK else "given")
    assert (head.ids is not None) == ("reduced" in packaging.parts)
    assert ("markov_head" in head) == any("markov" in p for p in packaging.parts)
    kinds = {"markov gated": "gated", "markov rnn": "rnn"}
    kind = [kinds[part] for part in packaging.parts if part in kinds]
    assert head.dspark.markov == (kind[0] if kind else "vanilla")


def test_the_form_of_the_targets_rope_is_kept(tmp_path: Path) -> None:
    model = build("llama", layers=4)
    plain = load_dspark(write_block(tmp_path / "1", "deepspec"), model).head
    half_rotated = load_dspark(write_block(tmp_path / "2", "qwen3.5"), model).head
    pairs = load_dspark(write_block(tmp_path / "3", "lfm2"), model).head
    yarn = load_dspark(write_block(tmp_path / "4", "specforge"), model).head
    ropes = [
        head.layers[0].self_attn.rope for head in (plain, half_rotated, pairs, yarn)
    ]
    assert [rope.dims for rope in ropes] == [16, 8, 16, 16]
    assert [rope.traditional for rope in ropes] == [False, False, True, False]
    assert "Yarn" in type(ropes[3]).__name__


@pytest.mark.parametrize(
    ("name", "keys", "expected"),
    [
        ("deepspec", {}, (False, False)),
        ("nvidia", {}, (False, False)),
        ("specforge", {}, (False, False)),
        ("speculators", {}, (True, False)),
        ("speculators, said", {}, (True, False)),
        ("speculators", {"speculators_config": {}}, (True, True)),
        ("speculators", {"speculators_config": {"proposal_methods": []}}, (True, True)),
        ("speculators", {"target_layer_ids": [1]}, (False, False)),
    ],
)
def test_what_config_json_leaves_open(
    name: str, keys: dict[str, Any], expected: tuple[bool, bool]
) -> None:
    assert open_readings({**PACKAGINGS[name].config(LAYERS), **keys}) == expected


def test_a_gguf_file_leaves_the_layers_open(tmp_path: Path) -> None:
    folder = write_block(tmp_path, "prism")
    config, tensors = read_gguf(folder / "drafter.gguf")
    assert open_readings(config) == (True, False)
    assert config["target_layer_ids"] == list(LAYERS)
    assert "layers.1.mlp.down_proj.weight" in tensors
    drafter = load_dspark(folder / "drafter.gguf", build("llama", layers=4))
    assert drafter.layers == LAYERS


def test_readings_can_be_named(tmp_path: Path) -> None:
    model = build("llama", layers=4)
    folder = write_block(tmp_path, "speculators, given", (0, 1, 2))
    usual = load_dspark(folder, model)
    named = load_dspark(folder, model, layer_ids="layers", anchor="samples")
    assert (usual.layers, usual.head.depth) == ((0, 1, 2), BLOCK - 1)
    assert (named.layers, named.head.depth) == ((1, 2, 3), BLOCK)
    with pytest.raises(InvalidRequestError, match="layer_ids is 'counted'"):
        load_dspark(folder, model, layer_ids="counted")  # type: ignore[arg-type]


def test_the_embeddings_can_be_read(tmp_path: Path) -> None:
    drafter = load_dspark(
        write_block(tmp_path, "deepspec", (-1, 0, 2)), build("llama", layers=4)
    )
    assert drafter.layers == (-1, 0, 2)


def test_an_anchor_after_the_block_is_not_a_row_of_it() -> None:
    config = PACKAGINGS["deepspec"].config(LAYERS)
    blocks = read_settings({**config, "dspark_bonus_anchor": True}).blocks
    assert (blocks.block, blocks.depth) == (BLOCK - 1, BLOCK - 1)
    keys = {"dspark_bonus_anchor": True, "sample_from_anchor": False}
    blocks = read_settings({**config, **keys}).blocks
    assert (blocks.block, blocks.depth) == (BLOCK, BLOCK - 1)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"markov_head_type": "lstm"}, "markov_head_type 'lstm'"),
        ({"mask_token_id": -1}, "mask_token_id -1"),
        ({"dspark_block_size": 5}, "dspark_block_size 5: the model is a DeepSeek V4"),
        ({"log_snr_conditioning": True}, "min_log_snr None and max_log_snr None"),
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
    ],
)
def test_a_config_that_is_not_known_is_refused(
    keys: dict[str, Any], message: str
) -> None:
    config = {**PACKAGINGS["deepspec"].config(LAYERS), **keys}
    with pytest.raises(ModelFolderError, match=message):
        read_settings(config)


def test_a_markov_head_that_is_missing_is_missed(tmp_path: Path) -> None:
    folder = write_block(tmp_path, "deepspec, dflash")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["markov_rank"] = 8
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelFolderError, match=r"markov_rank 8, but .* no markov_head"):
        load_dspark(folder, build("llama", layers=4))


def test_another_gguf_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "other.gguf"
    tensors = {"token_embd.weight": mx.ones((VOCAB, 32))}
    mx.save_gguf(str(file), tensors, {"general.architecture": "llama"})
    with pytest.raises(ModelFolderError, match=r"'llama', but only 'dspark'"):
        load_dspark(tmp_path, build("llama", layers=4))
    file.write_bytes(b"nothing")
    with pytest.raises(ModelFolderError, match="cannot be read"):
        load_dspark(file, build("llama", layers=4))

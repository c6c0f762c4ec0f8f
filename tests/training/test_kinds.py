"""Trained drafters of each kind: their initial weights, saving and loading."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from mlx_speculation.engine import EagleDraft
from mlx_speculation.errors import (
    InvalidRequestError,
    ModelFolderError,
    UnsupportedModelError,
)
from mlx_speculation.models import MtpConvention, load
from mlx_speculation.models.eagle import load_eagle_head
from mlx_speculation.models.mtp import load_mtp_head
from mlx_speculation.training.kinds.eagle_head import EagleTrainee, usual_layers
from mlx_speculation.training.kinds.mtp_head import MtpTrainee
from mlx_speculation.training.kinds.small_model import SmallModelTrainee
from mlx_speculation.training.output import curves
from mlx_speculation.training.teacher import TargetModel
from mlx_speculation.training.training_run import train
from mlx_speculation.training.unroll import Recorded
from support.models import mtp_checkpoints
from support.models.chat_folders import VOCAB, chat_folder
from support.models.demo_folders import copy_of
from support.models.tiny_models import TINY_MODELS
from support.references.reference_target import target
from support.short_training import OPTIONS, lengths

HEADS = ["qwen3_next", "mimo", "deepseek_v3", "glm4_moe_lite", "step3p5"]


@pytest.fixture(autouse=True)
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no curves: drawing takes longer than these trainings."""
    monkeypatch.setattr(curves, "_draw", lambda *_: None)


def flat(module: Any) -> dict[str, mx.array]:
    pairs: Any = tree_flatten(module.parameters())
    return dict(pairs)


def nearly(one: mx.array, other: mx.array) -> bool:
    scale = max(1.0, float(mx.abs(one).max()))
    return float(mx.abs(one - other).max()) <= 0.005 * scale


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_an_eagle_head_is_loaded_as_it_was_written(
    bits: int | None, tmp_path: Path
) -> None:
    config = {"intermediate_size": 96, "num_attention_heads": 4, "rope_theta": 500.0}
    ids = np.arange(2, 256, 2)
    made = EagleTrainee(target(), config, ids, None, seed=1)
    made.save(tmp_path, bits)
    head, layers, _ = load_eagle_head(tmp_path, target())
    assert layers == made.layers == usual_layers(8)
    assert head.ids is not None
    assert head.ids.tolist() == ids.tolist()
    if bits is None:
        loaded = flat(head)
        assert loaded.keys() == flat(made.module).keys()
        assert all(nearly(value, loaded[n]) for n, value in flat(made.module).items())
    said = json.loads((tmp_path / "config.json").read_text())
    assert said["architectures"] == ["LlamaForCausalLMEagle3"]
    assert ("quantization" in said) == (bits is not None)
    draft = EagleDraft.from_folder(tmp_path, target())
    assert draft.eagle.layers == made.layers


def test_a_new_head_begins_with_the_targets_output_and_norm() -> None:
    ids = np.arange(2, 256, 2)
    made = EagleTrainee(target(), {"num_attention_heads": 4}, ids, [1, 2], seed=1)
    model: Any = target()
    rows = model.model.embed_tokens if "lm_head" not in model else model.lm_head
    assert mx.array_equal(made.module.lm_head.weight, rows.weight[mx.array(ids)])
    assert nearly(made.module.norm.weight, model.model.norm.weight)
    again = EagleTrainee(target(), {"num_attention_heads": 4}, ids, [1, 2], seed=1)
    other = EagleTrainee(target(), {"num_attention_heads": 4}, ids, [1, 2], seed=2)
    assert mx.array_equal(made.module.fc.weight, again.module.fc.weight)
    assert not mx.array_equal(made.module.fc.weight, other.module.fc.weight)


def test_layers_of_deep_and_shallow_targets() -> None:
    assert usual_layers(36) == (1, 17, 32)
    assert usual_layers(6) == (1, 2)
    assert usual_layers(3) == (0, 1, 2)
    with pytest.raises(UnsupportedModelError, match="1 layers"):
        usual_layers(1)


@pytest.mark.parametrize("name", HEADS)
def test_an_mtp_head_is_loaded_as_it_was_written(name: str, tmp_path: Path) -> None:
    made = mtp_checkpoints.write(tmp_path / "target", name)
    family = mtp_checkpoints.family(made.layout)
    convention = replace(
        family.convention, norms="plus_one" if made.layout.plus_one else "stored"
    )
    trainee = MtpTrainee(made.target, None, made.folder, convention)
    out = tmp_path / "head"
    out.mkdir()
    trainee.save(out, None)
    stored = replace(convention, norms="stored")
    head = load_mtp_head(made.folder, made.target, convention=stored, split=out)
    loaded, expected = flat(head), flat(trainee.module)
    assert loaded.keys() == expected.keys()
    assert all(nearly(value, loaded[name]) for name, value in expected.items())
    module: Any = trainee.module
    trained = dict(tree_flatten(module.trainable_parameters()))
    assert "layers.0.proj.weight" in trained
    assert not [n for n in trained if "switch_mlp" in n or ".output." in n]


def test_a_head_with_other_caches_is_refused(tmp_path: Path) -> None:
    made = mtp_checkpoints.write(tmp_path, "deepseek_v32")
    with pytest.raises(UnsupportedModelError, match="keeps a CacheList"):
        MtpTrainee(made.target, None, made.folder, MtpConvention(norms="stored"))


def test_a_target_without_a_head_is_refused(tmp_path: Path) -> None:
    folder = chat_folder(tmp_path / "target")
    options = replace(OPTIONS, kind="mtp", depths=None)
    with pytest.raises(UnsupportedModelError, match=r"^MTP heads of .* not supported"):
        train(folder, tmp_path / "head", options)


def draft_config(folder: Path) -> Path:
    folder.mkdir()
    args = {**TINY_MODELS["llama"].args, "vocab_size": VOCAB, "num_hidden_layers": 2}
    args["intermediate_size"] = 96  # not divisible by 64, so quantized in groups of 32
    text = json.dumps({"model_type": "llama", **args})
    (folder / "config.json").write_text(text)
    return folder


@pytest.mark.openblas
def test_a_draft_model_learns_and_is_loaded(tmp_path: Path) -> None:
    folder = chat_folder(tmp_path / "target")
    small = draft_config(tmp_path / "small")
    options = replace(
        OPTIONS,
        kind="draft",
        draft_model=small,
        depths=None,
        draft_vocab=0,
        steps=18,
        rate=5e-3,
    )
    result = train(folder, tmp_path / "draft", options)
    untrained, *_, last = (
        each["acceptance"]["sampled"]["positions"][0]
        for each in result.record["evaluations"]
    )
    assert last > untrained + 0.01
    model, tokenizer = load(tmp_path / "draft")
    assert len(model.layers) == 2
    assert tokenizer.eos_token_ids == {256}


@pytest.mark.parametrize("bits", [None, 8])
def test_a_draft_model_is_written_as_it_is(bits: int | None, tmp_path: Path) -> None:
    folder = chat_folder(tmp_path / "target")
    model, tokenizer = load(folder)
    made = SmallModelTrainee(
        model, tokenizer, folder, draft_config(tmp_path / "small"), seed=3
    )
    out = tmp_path / "draft"
    out.mkdir()
    made.save(out, bits)
    loaded, _ = load_model(out)
    tokens = mx.array([[1, 2, 3]])
    module: Any = made.module
    error = mx.abs(loaded(tokens) - module(tokens)).max() / mx.abs(module(tokens)).max()
    assert float(error) < 0.05


def test_a_quantized_draft_model_is_refused(tmp_path: Path) -> None:
    folder = chat_folder(tmp_path / "target")
    model, tokenizer = load(folder)
    small = draft_config(tmp_path / "small")
    out = tmp_path / "draft"
    out.mkdir()
    SmallModelTrainee(model, tokenizer, folder, small, seed=3).save(out, 8)
    (small / "config.json").write_text("{}")
    with pytest.raises(ModelFolderError, match="make a model of the draft"):
        SmallModelTrainee(model, tokenizer, folder, small, seed=3)


def test_no_row_is_longer_than_a_table_of_positions(tmp_path: Path) -> None:
    folder = chat_folder(tmp_path / "target")
    model, tokenizer = load(folder)
    small = tmp_path / "small"
    small.mkdir()
    sizes = {"n_ctx": 8, "n_positions": 8, "n_embd": 32, "n_head": 4, "n_layer": 1}
    config = {"model_type": "gpt2", "vocab_size": VOCAB, "layer_norm_epsilon": 1e-5}
    (small / "config.json").write_text(
        json.dumps({**config, **sizes, "num_key_value_heads": 4})
    )
    made = SmallModelTrainee(model, tokenizer, folder, small, seed=3)
    tokens = mx.zeros((2, 10), mx.int32)
    with pytest.raises(InvalidRequestError, match=r"9 tokens.* 8 positions"):
        made.run(Recorded([], tokens, 3), lambda _, logits: logits)
    assert len(made.run(Recorded([], tokens[:, :9], 3), lambda _, logits: logits)) == 3
    teacher = TargetModel(made.module, made)
    with pytest.raises(InvalidRequestError, match=r"10 tokens.* 8 positions"):
        teacher.lesson(tokens)
    assert teacher.lesson(tokens[:, :8]).logits.shape[:2] == (2, 8)


@pytest.mark.slow
def test_the_head_of_the_bundled_hybrid_is_trained_on(tmp_path: Path) -> None:
    folder = copy_of("hybrid", tmp_path / "hybrid")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"def add(a, b):"\n"The history of"\n"import os"\n' * 8)
    options = replace(
        OPTIONS, kind="mtp", depths=3, prompts=prompts, steps=4, rate=1e-4
    )
    result = train(folder, tmp_path / "head", options)
    assert result.ended == "steps"
    assert min(lengths(result)) > 1.5
    head = load_mtp_head(folder, load(folder)[0], split=tmp_path / "head")
    assert head.convention.norms == "stored"

"""Sources of a head's convention. A head is probed once; the result is saved."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_speculation import CostFileWarning, DraftNotice
from mlx_speculation.errors import ConventionError, ModelFolderError
from mlx_speculation.models import MtpConvention, load
from mlx_speculation.models.checkpoints.probe_text import STARTS
from mlx_speculation.models.mtp import load_mtp_head, load_with_convention
from support.models.demo_folders import copy_of
from support.models.mtp_checkpoints import LAYOUTS, family, flat, save, write
from support.models.trained_head import trained

RIGHT = MtpConvention(norms="stored")


class Untouched:
    """A tokenizer that fails when a probe uses it."""

    def encode(self, text: str) -> list[int]:
        raise AssertionError("a probe ran")


@pytest.fixture(name="cache", autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLX_SPECULATION_CACHE", str(tmp_path / "cache"))
    # Two of the four texts are enough to tell conventions apart.
    monkeypatch.setattr(load_with_convention, "STARTS", STARTS[:2])
    return tmp_path / "cache"


@pytest.fixture(name="hybrid")
def _hybrid(tmp_path: Path) -> Path:
    return copy_of("hybrid", tmp_path / "hybrid")


@pytest.mark.openblas
@pytest.mark.usefixtures("short_probe")
def test_a_probe_finds_the_convention_once_and_saves_it(
    hybrid: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe finds the convention even if the usual convention is wrong."""
    model = trained().model
    wrong = replace(RIGHT, order="hidden_first")
    with monkeypatch.context() as patch:
        patch.setattr(load_with_convention, "decided", lambda usual, probed: wrong)
        head = load_mtp_head(hybrid, model)
    assert head.convention == RIGHT
    (file,) = cache.glob("conventions/*.json")
    saved = json.loads(file.read_text(encoding="utf-8"))
    assert saved["convention"]["order"] == "embedding_first"
    again = load_mtp_head(hybrid, model, tokenizer=Untouched())
    named = load_mtp_head(hybrid, model, convention=RIGHT, tokenizer=Untouched())
    for other in (again, named):
        assert other.convention == RIGHT
        weights, expected = flat(other), flat(head)
        assert weights.keys() == expected.keys()
        assert all(mx.array_equal(weights[name], expected[name]) for name in weights)
    # A saved convention is used without a probe until the hashes of the files change.
    saved["convention"]["recycled"] = "before_norm"
    file.write_text(json.dumps(saved), encoding="utf-8")
    kept = load_mtp_head(hybrid, model, tokenizer=Untouched())
    assert kept.convention.recycled == "before_norm"
    file.write_text("{", encoding="utf-8")
    with (
        pytest.warns(CostFileWarning, match="is probed again"),
        pytest.raises(AssertionError, match="a probe ran"),
    ):
        load_mtp_head(hybrid, model, tokenizer=Untouched())
    change(hybrid / "model.safetensors", "mtp.layers.0.mlp.up_proj.biases")
    with pytest.raises(AssertionError, match="a probe ran"):
        load_mtp_head(hybrid, model, tokenizer=Untouched())


def mix_norms(hybrid: Path) -> None:
    """Move the head to its own file, and subtract 1 from one of its norms."""
    shard = hybrid / "model.safetensors"
    weights: Any = mx.load(str(shard))
    head = {name: value for name, value in weights.items() if name.startswith("mtp.")}
    mx.eval(weights)
    rest = {name: value for name, value in weights.items() if name not in head}
    name = "mtp.pre_fc_norm_embedding.weight"
    head[name] = head[name].astype(mx.float32) - 1
    save(shard, rest, kind="mlx")
    save(hybrid / "mtp.safetensors", head, kind="mlx")


@pytest.mark.openblas
def test_norms_in_two_forms_are_found_and_said(
    hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_with_convention, "STARTS", STARTS)
    mix_norms(hybrid)
    made = trained()
    with pytest.warns(DraftNotice, match="only the norms norm_e seem"):
        head = load_mtp_head(hybrid, made.model)
    assert head.convention == replace(RIGHT, norms=("norm_e",))
    applied = flat(head)
    for name, weight in made.stored.items():
        assert mx.allclose(applied[name], weight, atol=1e-2), name
    again = load_mtp_head(hybrid, made.model, tokenizer=Untouched())
    assert again.convention == head.convention


def change(file: Path, name: str) -> None:
    whole = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(whole[:8], "little")
    end = json.loads(whole[8:start])[name]["data_offsets"][1]
    whole[start + end - 1] ^= 1
    file.write_bytes(whole)


@pytest.mark.parametrize("name", ["qwen3_5", "mimo", "deepseek_v3"])
def test_a_random_head_needs_a_convention(
    name: str, tmp_path: Path, cache: Path
) -> None:
    made = write(tmp_path / "model", name)
    model, tokenizer = load(made.folder)
    with pytest.raises(ConventionError, match=r"the shards does not.*any convention"):
        load_mtp_head(made.folder, model, tokenizer=tokenizer)
    assert not cache.exists()
    convention = family(LAYOUTS[name]).convention
    head = load_mtp_head(
        made.folder, model, convention=convention, tokenizer=Untouched()
    )
    assert head.convention.order == convention.order


def test_without_a_tokenizer_there_is_no_text_to_probe(tmp_path: Path) -> None:
    made = write(tmp_path / "model", "mimo")
    for file in made.folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelFolderError, match=r"the tokenizer of .* cannot be read"):
        load_mtp_head(made.folder, made.target)


def test_norms_that_the_files_tell_are_not_tried(tmp_path: Path) -> None:
    made = write(tmp_path / "model", "qwen3_5")
    with pytest.raises(ConventionError) as error:
        load_mtp_head(made.folder, made.target)
    assert "norms plus_one" in str(error.value)
    assert "norms stored" not in str(error.value)


def test_a_mixed_convention_can_be_named(tmp_path: Path) -> None:
    made = write(tmp_path / "model", "qwen3_5")
    mixed: Any = ("norm_e", "input_layernorm")
    head = load_mtp_head(
        made.folder, made.target, convention=MtpConvention(norms=mixed)
    )
    loaded, stored = flat(head), made.tensors
    for ours, theirs, one in (
        ("norm_e", "mtp.pre_fc_norm_embedding", 1),
        ("norm_h", "mtp.pre_fc_norm_hidden", 0),
        ("blocks.0.input_layernorm", "mtp.layers.0.input_layernorm", 1),
        ("blocks.0.self_attn.q_norm", "mtp.layers.0.self_attn.q_norm", 0),
    ):
        weight = loaded[f"layers.0.{ours}.weight"]
        assert mx.array_equal(weight, stored[f"{theirs}.weight"] + one), ours

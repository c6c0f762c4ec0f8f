"""Heads and conventions in the formats of other programs."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_speculation import SpeculativeGenerator, demo_models
from mlx_speculation.engine.drafters.registry import draft_of_config
from mlx_speculation.errors import DraftNotice, ModelFolderError
from mlx_speculation.models import MtpConvention, load
from mlx_speculation.models.checkpoints.probe_text import STARTS
from mlx_speculation.models.mtp import load_mtp_head, load_with_convention
from mlx_speculation.models.mtp.load import build_mtp_head, decided, find_mtp_head
from mlx_speculation.models.mtp.pack_convention import pack_convention
from support.identity import plain_text, prompt_of
from support.models.demo_folders import copy_of
from support.models.mtp_checkpoints import (
    LAYOUTS,
    Weights,
    family,
    flat,
    head_tensors,
    make,
    save,
    write_folder,
)
from support.models.trained_head import trained

DEFAULT = MtpConvention()


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SPECULATION_CACHE", str(tmp_path / "cache"))
    # Two of the four texts are enough to tell conventions apart.
    monkeypatch.setattr(load_with_convention, "STARTS", STARTS[:2])


@pytest.mark.parametrize(
    ("fields", "convention"),
    [
        ({}, DEFAULT),
        ({"base_hidden_variant": "pre_norm"}, MtpConvention(hidden="before_norm")),
        ({"hidden_variant": "pre_norm"}, MtpConvention(recycled="before_norm")),
        ({"concat_order": "hidden_embedding"}, MtpConvention(order="hidden_first")),
        (
            {
                "base_hidden_variant": "post_norm",
                "hidden_variant": "post_norm",
                "concat_order": "embedding_hidden",
                "mtp_position_mode": "absolute",
                "mtp_quant_bits": 4,
                "mtp_quant_policy": "cyankiwi",
                "mtp_prequantized": True,
            },
            DEFAULT,
        ),
    ],
)
@pytest.mark.parametrize("place", ["config.json", "mtplx_runtime.json"])
def test_a_pack_s_convention_is_read_and_said(
    place: str, fields: dict[str, Any], convention: MtpConvention, tmp_path: Path
) -> None:
    config: dict[str, Any] = {}
    if place == "config.json":
        config = {"mtplx_mtp_contract": fields}
    else:
        text = json.dumps({"mtp_contract": fields, "other": 1})
        (tmp_path / place).write_text(text, encoding="utf-8")
    with pytest.warns(DraftNotice, match=f"taken from .*{place}"):
        assert pack_convention(tmp_path, config) == convention


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_variant": "after_norm"},
        {"hidden_variant": ["post_norm"]},
        {"concat_order": "sum"},
        {"mtp_position_mode": "rotated"},
        {"mtp_streams": 4},
        "post_norm",
        [],
    ],
)
def test_a_pack_s_convention_that_is_not_understood_is_passed_over(
    fields: Any, tmp_path: Path
) -> None:
    with pytest.warns(DraftNotice, match="is ignored: "):
        assert pack_convention(tmp_path, {"mtplx_mtp_contract": fields}) is None
    (tmp_path / "mtplx_runtime.json").write_text("{", encoding="utf-8")
    with pytest.warns(DraftNotice, match="is ignored"):
        assert pack_convention(tmp_path, {}) is None


@pytest.mark.openblas
@pytest.mark.usefixtures("short_probe")
def test_what_a_pack_does_not_say_of_its_norms_is_probed(tmp_path: Path) -> None:
    """config.json's `base_hidden_variant` is used; a probe would choose another."""
    folder = copy_of("hybrid", tmp_path / "hybrid")
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["mtplx_mtp_contract"] = {"base_hidden_variant": "pre_norm"}
    file.write_text(json.dumps(config), encoding="utf-8")
    model = trained().model
    with pytest.warns(DraftNotice, match="hidden before_norm"):
        head = load_mtp_head(folder, model)
    assert head.convention == MtpConvention(hidden="before_norm", norms="stored")
    config["mtp_norm_encoding"] = "delta"
    file.write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer.json").unlink()
    with pytest.warns(DraftNotice):
        head = load_mtp_head(folder, model)
    assert head.convention == MtpConvention(hidden="before_norm", norms="plus_one")


GLM_SPLIT = {
    "proj": "model.eh_proj",
    "norm_e": "model.enorm",
    "norm_h": "model.hnorm",
    "final": "model.shared_head_norm",
    "block": "model.mtp_block",
}
SPLITS = {
    "qwen3_5": "qwen3_5_mtp",
    "qwen3_5_moe": "qwen3_5_moe_mtp",
    "qwen3_next": "qwen3_next_mtp",
    "nemotron_h": "nemotron_h_mtp",
    "glm4_moe_lite": "glm4_moe_lite_mtp",
}


def split(folder: Path, name: str, *, kind: str = "mlx") -> tuple[Path, Any, Any]:
    """Write a target and its head to two folders, as mlx-vlm splits a checkpoint."""
    config, target, head = make(name)
    write_folder(folder / "target", config, [flat(target)], kind="mlx")
    tensors = head_tensors(LAYOUTS[name], target, head, raw=False)
    if name == "glm4_moe_lite":
        tensors = flat_glm(flat(head), flat(target))
    else:
        tensors = {n.removeprefix("mtp."): v for n, v in tensors.items()}
    of_head = folder / "head"
    of_head.mkdir(parents=True, exist_ok=True)
    save(of_head / "model.safetensors", tensors, kind=kind)
    said = {"model_type": SPLITS[name], "text_config": {}, "block_size": 3}
    (of_head / "config.json").write_text(json.dumps(said), encoding="utf-8")
    return of_head, target, head


def flat_glm(head: Weights, target: Weights) -> Weights:
    """Return tensors of a split GLM head, with the target's embedding and output."""
    tensors = {
        "model.embed_tokens.weight": target["model.embed_tokens.weight"],
        "lm_head.weight": target["lm_head.weight"],
    }
    for name, value in head.items():
        part, _, rest = name.removeprefix("layers.0.").partition(".")
        if part == "blocks":
            part, rest = "block", rest.removeprefix("0.")
        tensors[f"{GLM_SPLIT[part]}.{rest}"] = value
    return tensors


@pytest.mark.parametrize("name", SPLITS)
def test_a_head_in_a_folder_of_its_own_is_read(name: str, tmp_path: Path) -> None:
    of_head, target, head = split(tmp_path, name)
    head_files = find_mtp_head(tmp_path / "target", target, split=of_head)
    convention = decided(None, head_files)
    assert convention.norms == "stored"
    loaded, _ = build_mtp_head(head_files, target, convention)
    ours, theirs = flat(loaded), flat(head)
    assert ours.keys() == theirs.keys()
    assert all(mx.array_equal(ours[n], theirs[n]) for n in theirs)


@pytest.mark.parametrize("name", ["qwen3_5", "glm4_moe_lite"])
def test_a_head_in_a_folder_of_its_own_drafts(name: str, tmp_path: Path) -> None:
    of_head, target, _ = split(tmp_path, name)
    assert draft_of_config({"model_type": SPLITS[name]}).kind == "mtp"
    convention = family(LAYOUTS[name]).convention
    made = SpeculativeGenerator.from_pretrained(
        tmp_path / "target", draft=of_head, convention=convention
    )
    result = made.generate(prompt_of(20), max_tokens=12)
    assert result.tokens == plain_text(target, prompt_of(20), 12)
    assert result.stats.sources["mtp"].drafted > 0
    fields = {"draft": "../head", "kind": "mtp", "convention": {"norms": "stored"}}
    pair = tmp_path / "target" / "speculation.json"
    pair.write_text(json.dumps(fields), encoding="utf-8")
    chosen = SpeculativeGenerator.from_pretrained(tmp_path / "target", draft="auto")
    assert chosen.generate(prompt_of(20), max_tokens=12).tokens == result.tokens


@pytest.mark.openblas
@pytest.mark.usefixtures("short_probe")
def test_a_split_head_is_probed(tmp_path: Path) -> None:
    target = demo_models()["hybrid"]
    weights: Any = mx.load(str(target / "model.safetensors"))
    ours = {n.removeprefix("mtp."): w for n, w in weights.items() if n[:4] == "mtp."}
    save(tmp_path / "model.safetensors", ours, kind="mlx")
    config = json.dumps({"model_type": "qwen3_5_mtp"})
    (tmp_path / "config.json").write_text(config, encoding="utf-8")
    head = load_mtp_head(target, trained().model, split=tmp_path)
    assert head.convention == MtpConvention(norms="stored")


def test_norms_of_a_split_head_that_is_not_of_mlx_are_not_known(
    tmp_path: Path,
) -> None:
    of_head, target, _ = split(tmp_path, "qwen3_5", kind="pt")
    with pytest.raises(ModelFolderError, match="nothing in the folder tells"):
        load_mtp_head(tmp_path / "target", target, split=of_head, convention=DEFAULT)


def test_a_split_head_of_another_type_is_refused(tmp_path: Path) -> None:
    of_head, _, _ = split(tmp_path, "nemotron_h")
    _, target, _ = make("qwen3_5")
    folder = tmp_path / "target"
    with pytest.raises(ModelFolderError, match=r"'nemotron_h_mtp', but the target"):
        load_mtp_head(folder, target, split=of_head, convention=DEFAULT)
    config = json.dumps({"model_type": "qwen3_5_mtp"})
    (of_head / "config.json").write_text(config, encoding="utf-8")
    with pytest.raises(ModelFolderError, match=r"lacks|holds no MTP head|not known"):
        load_mtp_head(folder, target, split=of_head, convention=DEFAULT)


@pytest.mark.parametrize("name", ["glm4_moe", "glm4_moe_lite"])
def test_a_head_of_glm_in_the_dialect_of_mtplx_is_read(
    name: str, tmp_path: Path
) -> None:
    config, target, head = make(name)
    names = {"proj": "eh_proj", "norm_e": "enorm", "norm_h": "hnorm", "final": "norm"}
    tensors: Weights = {}
    for ours, value in flat(head).items():
        part, _, rest = ours.removeprefix("layers.0.").partition(".")
        if part == "blocks":
            part, rest = "block", rest.removeprefix("0.")
        tensors[f"mtp.0.{names.get(part, part)}.{rest}"] = value
    write_folder(tmp_path, config, [flat(target), tensors], kind="mlx", index=False)
    model, _ = load(tmp_path)
    assert flat(model).keys() == flat(target).keys()
    loaded = load_mtp_head(tmp_path, model, convention=DEFAULT)
    ours_all, theirs = flat(loaded), flat(head)
    assert ours_all.keys() == theirs.keys()
    assert all(mx.array_equal(ours_all[n], theirs[n]) for n in theirs)

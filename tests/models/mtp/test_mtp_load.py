"""Targets and heads are read from files in the layout of every family."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import mlx.core as mx
import mlx_lm
import mlx_lm.models.deepseek_v3 as deepseek_v3
import pytest
from mlx_lm.utils import load_model

from mlx_speculation.errors import ModelFolderError, UnsupportedModelError
from mlx_speculation.models import load
from mlx_speculation.models.checkpoints import draft_checkpoint
from mlx_speculation.models.checkpoints.convention import MtpConvention
from mlx_speculation.models.mtp.families import FAMILIES
from mlx_speculation.models.mtp.load_with_convention import load_mtp_head
from mlx_speculation.models.safetensors_layout import INDEX
from support.covering import others_slow
from support.identity import plain_text, prompt_of
from support.models import tiny_models
from support.models.mtp_checkpoints import (
    EACH_KIND,
    LAYOUTS,
    Checkpoint,
    Weights,
    flat,
    head_tensors,
    make,
    read_mtp_head,
    save,
    write,
    write_folder,
)

Write = Callable[[str], Checkpoint]


@pytest.fixture(name="written", scope="module")
def _written(tmp_path_factory: pytest.TempPathFactory) -> Write:
    @cache
    def one(name: str) -> Checkpoint:
        return write(tmp_path_factory.mktemp(name) / "model", name)

    return one


@pytest.fixture(name="changed")
def _changed(written: Write, tmp_path: Path) -> Write:
    """Return a function that copies a checkpoint, for tests that change the copy."""

    def one(name: str) -> Checkpoint:
        made = written(name)
        folder = tmp_path / name
        shutil.copytree(made.folder, folder)
        fields = {field: getattr(made, field) for field in Checkpoint.__slots__}
        return Checkpoint(**{**fields, "folder": folder})

    return one


def same(left: Weights, right: Weights) -> None:
    """Assert equal weights, up to rounding of norms: 1 was subtracted and added."""
    assert left.keys() == right.keys()
    for name, value in left.items():
        if "norm" in name or "final" in name:
            assert mx.allclose(value, right[name], atol=1e-6), name
        else:
            assert mx.array_equal(value, right[name]), name


def used(made: Checkpoint, layers: int) -> Weights:
    keep = tuple(f"layers.{k}." for k in range(layers))
    return {n: v for n, v in flat(made.head).items() if n.startswith(keep)}


def test_every_family_has_a_checkpoint() -> None:
    modules = {layout.module for layout in LAYOUTS.values()}
    assert modules == {module for family in FAMILIES for module in family.modules}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_head_is_read_tensor_by_tensor(name: str, written: Write) -> None:
    made = written(name)
    head = read_mtp_head(made.folder, made.target)
    layers = 1 if name == "mimo_v2_flash" else len(made.head.layers)
    assert len(head.layers) == layers
    same(flat(head), used(made, layers))


@pytest.mark.parametrize("name", others_slow(LAYOUTS, EACH_KIND))
def test_a_target_loads_without_its_head_and_generates(
    name: str, written: Write
) -> None:
    made = written(name)
    model, _ = load(made.folder)
    assert type(model) is type(made.target)
    same(flat(model), flat(made.target))
    prompt = prompt_of(20)
    assert plain_text(model, prompt, 12) == plain_text(made.target, prompt, 12)


@pytest.mark.parametrize("name", ["deepseek_v3", "bailing_moe"])
def test_a_target_loads_that_mlx_lm_alone_refuses(name: str, written: Write) -> None:
    made = written(name)
    with pytest.raises(ValueError, match="parameters not in model"):
        load_model(made.folder)
    sanitize = deepseek_v3.Model.sanitize
    load(made.folder)
    assert deepseek_v3.Model.sanitize is sanitize
    with pytest.raises(ValueError, match="parameters not in model"):
        load_model(made.folder)


def test_a_stacked_target_with_a_head_loads(tmp_path: Path) -> None:
    config, target, head = make("qwen3_next")
    tensors = head_tensors(LAYOUTS["qwen3_next"], target, head, raw=False)
    write_folder(tmp_path, config, [flat(target) | tensors], kind="mlx", index=False)
    with pytest.raises(ValueError, match="parameters not in model"):
        load_model(tmp_path)
    model, _ = load(tmp_path)
    same(flat(model), flat(target))
    with pytest.raises(ModelFolderError, match="may be stored as"):
        read_mtp_head(tmp_path, model)
    loaded = load_mtp_head(tmp_path, model, convention=MtpConvention(norms="stored"))
    same(flat(loaded), flat(head))


def test_layers_after_a_target_without_a_family_are_left_out(tmp_path: Path) -> None:
    name = "bailing_moe_linear"
    target = tiny_models.build(name)
    args = dict(tiny_models.TINY_MODELS[name].args)
    extra = {"model.layers.4.enorm.weight": mx.ones(64)}
    write_folder(tmp_path, args, [flat(target) | extra])
    model, _ = load(tmp_path)
    same(flat(model), flat(target))
    with pytest.raises(UnsupportedModelError, match=r"^MTP heads of .* not supported"):
        read_mtp_head(tmp_path, model)


@pytest.mark.parametrize(
    "stray", ["model.layers.0.stray.weight", "model.mtp_extra", "stray"]
)
def test_other_tensors_that_no_model_has_are_refused(
    stray: str, changed: Write
) -> None:
    made = changed("deepseek_v3")
    save(made.folder / "model-00003.safetensors", {stray: mx.ones(3)})
    index = made.folder / INDEX
    named = json.loads(index.read_text())["weight_map"]
    named[stray] = "model-00003.safetensors"
    index.write_text(json.dumps({"weight_map": named}))
    with pytest.raises(ModelFolderError, match=stray):
        load(made.folder)


def test_a_target_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    config, target, _ = make("mimo")
    weights = flat(target)
    del weights["model.layers.1.mlp.up_proj.weight"]
    write_folder(tmp_path, config, [weights])
    with pytest.raises(ModelFolderError, match=r"model\.layers\.1\.mlp\.up_proj"):
        load(tmp_path)


# Tensors whose names in files differ from their names in errors.
_SAID = {
    "kv_b_proj.weight": "embed_q.weight",
    "experts.gate_up_proj": "switch_mlp.gate_proj.weight",
    "experts.down_proj": "switch_mlp.down_proj.weight",
}


@pytest.mark.parametrize("name", others_slow(LAYOUTS, EACH_KIND))
def test_a_head_that_lacks_any_tensor_is_refused_by_its_name(
    name: str, written: Write, tmp_path: Path
) -> None:
    made = written(name)
    trunk = len(made.target.layers)
    copies = {copy.format(n=trunk) for copy in made.layout.copies}
    unread = ".layers.1.", ".layers.2."  # MiMo-V2's unread layers
    needed = [
        tensor
        for tensor in made.tensors
        if tensor not in copies
        and not (name == "mimo_v2_flash" and any(each in tensor for each in unread))
    ]
    experts = [tensor for tensor in needed if ".experts." in tensor]
    convention = MtpConvention(norms="plus_one" if made.layout.plus_one else "stored")
    shutil.copy(made.folder / "config.json", tmp_path)
    for tensor in [*(t for t in needed if t not in experts), *experts[-1:]]:
        less = {n: v for n, v in made.tensors.items() if n != tensor}
        save(tmp_path / "mtp.safetensors", less)
        end = ".".join(tensor.split(".")[-2:])
        with pytest.raises(ModelFolderError) as error:
            load_mtp_head(tmp_path, made.target, convention=convention)
        assert _SAID.get(end, end) in str(error.value), tensor


def test_a_head_with_a_tensor_too_many_is_refused(changed: Write) -> None:
    made = changed("qwen3_5")
    extra = {"mtp.layers.0.self_attn.extra.weight": mx.ones(4)}
    save(made.folder / "model-00002-of-00002.safetensors", made.tensors | extra)
    (made.folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelFolderError, match=r"not known: mtp\.layers\.0\.self_attn"):
        read_mtp_head(made.folder, made.target)


@pytest.mark.parametrize("name", ["mimo", "deepseek_v3"])
def test_more_layers_than_are_understood_are_refused(name: str, changed: Write) -> None:
    made = changed(name)
    trunk = len(made.target.layers)
    again = {
        tensor.replace("mtp_layers.0", "mtp_layers.1").replace(
            f"layers.{trunk}.", f"layers.{trunk + 1}."
        ): value
        for tensor, value in made.tensors.items()
    }
    save(made.folder / "model-00003.safetensors", again)
    (made.folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelFolderError, match="has 2 layers"):
        read_mtp_head(made.folder, made.target)


def test_a_shape_that_the_config_does_not_say_is_refused(changed: Write) -> None:
    made = changed("glm4_moe")
    trunk = len(made.target.layers)
    name = f"model.layers.{trunk}.self_attn.k_proj.weight"
    wrong = made.tensors | {name: mx.ones((48, 64))}
    save(made.folder / "model-00002-of-00002.safetensors", wrong)
    with pytest.raises(ModelFolderError, match=r"\(48, 64\) instead of \(32, 64\)"):
        read_mtp_head(made.folder, made.target)


@pytest.mark.parametrize("name", ["qwen3_5", "glm4_moe", "nemotron_h"])
def test_a_declared_head_without_weights_is_an_error_that_says_so(
    name: str, tmp_path: Path
) -> None:
    config, target, _ = make(name)
    write_folder(tmp_path, config, [flat(target)], kind="mlx")
    said = "mtp_num_hidden" if name == "qwen3_5" else "num_nextn_predict"
    with pytest.raises(ModelFolderError, match=f"config.json has {said}.* = 1"):
        read_mtp_head(tmp_path, target)


def test_a_config_that_does_not_describe_the_blocks_is_refused(changed: Write) -> None:
    made = changed("step3p5")
    config = dict(made.config)
    config["layer_types"] = config["layer_types"][:4]
    (made.folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model, _ = load(made.folder)
    with pytest.raises(ModelFolderError, match="Layer 0 of the MTP head cannot be"):
        read_mtp_head(made.folder, model)


def test_norms_that_are_never_shifted_cannot_be_called_so(written: Write) -> None:
    made = written("mimo")
    with pytest.raises(ModelFolderError, match='are always "stored"'):
        load_mtp_head(
            made.folder, made.target, convention=MtpConvention(norms="plus_one")
        )


def test_the_convention_that_is_named_is_the_head_s(written: Write) -> None:
    made = written("qwen3_5")
    named = MtpConvention("before_norm", "before_norm", "hidden_first", "stored")
    head = load_mtp_head(made.folder, made.target, convention=named)
    assert head.convention == named
    norm = flat(head)["layers.0.norm_e.weight"]
    assert mx.array_equal(norm, made.tensors["mtp.pre_fc_norm_embedding.weight"])
    default = read_mtp_head(made.folder, made.target).convention
    assert default == MtpConvention(norms="plus_one")


def test_a_head_stays_in_the_precision_of_its_files(
    changed: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = changed("glm4_moe")
    half = {
        name: value if "correction" in name else value.astype(mx.bfloat16)
        for name, value in made.tensors.items()
    }
    save(made.folder / "model-00002-of-00002.safetensors", half)
    with monkeypatch.context() as patch:
        patch.setattr(draft_checkpoint, "runs_on_linux_cpu", lambda: False)
        head = flat(read_mtp_head(made.folder, made.target))
    kinds = {name: value.dtype for name, value in head.items()}
    bias = "layers.0.blocks.0.mlp.gate.e_score_correction_bias"
    assert kinds.pop(bias) == mx.float32
    assert set(kinds.values()) == {mx.bfloat16}
    wide = flat(load_mtp_head(made.folder, made.target, convention=MtpConvention()))
    assert {value.dtype for value in wide.values()} == {mx.float32}


def test_mlx_lm_is_the_one_whose_loading_was_read() -> None:
    assert mlx_lm.__version__.startswith("0.32.")

"""Packed heads: fp8, 4 bit, fused projections, latent attention."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models.checkpoints import draft_checkpoint
from mlx_speculation.models.checkpoints.convention import MtpConvention
from mlx_speculation.models.mtp.load_with_convention import load_mtp_head
from mlx_speculation.models.mtp.transforms import (
    is_norm,
    norms_of,
    transformed,
    with_ones,
)
from support.models.mtp_checkpoints import (
    LAYOUTS,
    Weights,
    flat,
    head_tensors,
    make,
    read_mtp_head,
    save,
    write_folder,
)

NORMS = {
    "layers.0.norm_e.weight",
    "layers.0.norm_h.weight",
    "layers.0.final.weight",
    "layers.0.blocks.0.input_layernorm.weight",
    "layers.0.blocks.0.post_attention_layernorm.weight",
    "layers.0.blocks.0.self_attn.q_norm.weight",
    "layers.0.blocks.0.self_attn.k_norm.weight",
}


def packed(
    tensors: Weights,
    names: list[str],
    *,
    mode: str = "affine",
    bits: int,
    group_size: int,
) -> Weights:
    result = dict(tensors)
    for name in names:
        path = name.removesuffix(".weight")
        weight, scales, *biases = mx.quantize(
            result.pop(name), group_size, bits, mode=mode
        )
        result |= {f"{path}.weight": weight, f"{path}.scales": scales}
        if biases:
            result[f"{path}.biases"] = biases[0]
    return result


def unpacked(
    tensors: Weights, *, mode: str = "affine", bits: int, group_size: int
) -> Weights:
    result = {n: v for n, v in tensors.items() if not n.endswith((".scales", "ases"))}
    for name, scales in tensors.items():
        path = name.removesuffix(".scales")
        if path != name:
            biases = tensors.get(f"{path}.biases")
            weight = tensors[f"{path}.weight"]
            result[f"{path}.weight"] = mx.dequantize(
                weight, scales, biases, group_size, bits, mode=mode
            )
    return result


def linears(tensors: Weights, *, but: str, group: int = 32) -> list[str]:
    """Return the names of linear weights, except gates and names that contain `but`."""
    return [
        name
        for name, value in tensors.items()
        if value.ndim >= 2
        and value.shape[-1] % group == 0
        and but not in name
        and "gate." not in name
    ]


FORMS: list[dict[str, Any]] = [
    {"bits": 4, "group_size": 32},
    {"bits": 8, "group_size": 64},
    {"bits": 3, "group_size": 32},
    {"bits": 4, "group_size": 32, "mode": "mxfp4"},
    {"bits": 8, "group_size": 32, "mode": "mxfp8"},
    {"bits": 4, "group_size": 16, "mode": "nvfp4"},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "mimo"])
def test_a_packed_head_is_read_as_its_shapes_say(
    name: str, form: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """config.json describes the target's packing, which differs from the head's."""
    config, target, head = make(name)
    layout = LAYOUTS[name]
    tensors = head_tensors(layout, target, head, raw=False)
    small = packed(
        tensors, linears(tensors, but="fc", group=form["group_size"]), **form
    )
    config["quantization"] = {"bits": 8, "group_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    convention = MtpConvention(norms="stored")
    save(tmp_path / "mtp.safetensors", small)
    with monkeypatch.context() as patch:
        patch.setattr(draft_checkpoint, "runs_on_linux_cpu", lambda: False)
        loaded = read_mtp_head(tmp_path, target, convention=convention)
    assert any(name.endswith(".scales") for name in flat(loaded))
    plain = load_mtp_head(tmp_path, target, convention=convention)
    save(tmp_path / "mtp.safetensors", unpacked(small, **form))
    expected = flat(load_mtp_head(tmp_path, target, convention=convention))
    assert flat(plain).keys() == expected.keys()
    for key, value in flat(plain).items():
        assert mx.array_equal(value, expected[key]), key


def test_a_pack_with_a_flag_has_norms_less_one(tmp_path: Path) -> None:
    """All but fc is packed in 4 bits. The result has 29 tensors, as real packs have."""
    config, target, head = make("qwen3_5")
    tensors = head_tensors(LAYOUTS["qwen3_5"], target, head)
    small = packed(tensors, linears(tensors, but="fc"), bits=4, group_size=32)
    assert len(small) == 29
    keys = {
        "mlx_lm_extra_tensors": {"mtp_file": "packed.safetensors"},
        "mtplx_mtp_quantization": {"norm_encoding": "delta_plus_one", "bits": 8},
    }
    write_folder(tmp_path, {**config, **keys}, [flat(target)], kind="mlx")
    save(tmp_path / "packed.safetensors", small)
    loaded = load_mtp_head(tmp_path, target, convention=MtpConvention())
    assert loaded.convention.norms == "plus_one"
    theirs, ours = flat(loaded), flat(head)
    for name in NORMS:
        assert mx.allclose(theirs[name], ours[name], atol=1e-6)
    fc = "layers.0.proj.weight"
    assert mx.array_equal(theirs[fc], ours[fc])


@pytest.mark.parametrize("name", ["qwen3_5", "step3p5", "deepseek_v32"])
def test_one_is_added_to_every_norm_and_to_nothing_else(name: str) -> None:
    _, _, head = make(name)
    weights = flat(head)
    result = with_ones(norms_of(transformed(weights, {})), "plus_one")
    changed = {n for n, v in result.items() if mx.array_equal(v, weights[n] + 1)}
    assert changed == result.keys()
    assert changed == {n for n in weights if is_norm(n)}
    if name == "qwen3_5":
        assert changed == NORMS
    if name == "step3p5":
        assert len(changed) == 3 * len(NORMS)


def test_packed_latent_projections_are_split_without_another_rounding(
    tmp_path: Path,
) -> None:
    config, target, head = make("glm4_moe_lite")
    tensors = head_tensors(LAYOUTS["glm4_moe_lite"], target, head)
    name = f"model.layers.{len(target.layers)}.self_attn.kv_b_proj.weight"
    small = packed(tensors, [name], bits=4, group_size=32)
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save(tmp_path / "mtp.safetensors", small)
    weights = flat(load_mtp_head(tmp_path, target, convention=MtpConvention()))
    both = unpacked(small, bits=4, group_size=32)[name].reshape(4, 32, 32)
    path = "layers.0.blocks.0.self_attn"
    assert mx.array_equal(
        weights[f"{path}.embed_q.weight"], both[:, :16].swapaxes(-1, -2)
    )
    assert mx.array_equal(weights[f"{path}.unembed_out.weight"], both[:, 16:])


def test_fp8_blocks_are_multiplied_by_their_scales() -> None:
    """The weight has 2 x 3 blocks of 128 x 128; those at its ends are partial."""
    key = mx.random.key(0)
    weight = mx.to_fp8(mx.random.normal((200, 300), key=key))
    scales = mx.random.uniform(0.5, 2, (2, 3), key=key)
    result = transformed({"a.weight": weight, "a.weight_scale_inv": scales}, {})
    assert result.keys() == {"a.weight"}
    values = np.array(mx.from_fp8(weight, dtype=mx.float32))
    expected = np.array(
        [
            [
                values[i, j] * scales[i // 128, j // 128].item()
                for j in (0, 127, 128, 299)
            ]
            for i in (0, 127, 128, 199)
        ]
    )
    got = result["a.weight"][mx.array([0, 127, 128, 199])][
        :, mx.array([0, 127, 128, 299])
    ]
    assert got.dtype == mx.bfloat16
    assert np.allclose(np.array(got.astype(mx.float32)), expected, rtol=2**-8)


def test_fp8_in_other_blocks_is_refused() -> None:
    weights = {
        "a.weight": mx.zeros((64, 64), dtype=mx.uint8),
        "a.weight_scale_inv": mx.ones((2, 2)),
    }
    with pytest.raises(ModelFolderError, match=r"with scales \(2, 2\)"):
        transformed(weights, {})


def test_an_fp8_head_of_deepseek_loads(tmp_path: Path) -> None:
    config, target, head = make("deepseek_v3")
    tensors = head_tensors(LAYOUTS["deepseek_v3"], target, head)
    fp8: Weights = {}
    for name, value in tensors.items():
        if "_proj" in name and "eh_proj" not in name:
            fp8[name] = mx.to_fp8(value * 4)
            fp8[f"{name}_scale_inv"] = mx.full((1, 1), 0.25)
        else:
            fp8[name] = value
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save(tmp_path / "mtp.safetensors", fp8)
    weights = flat(load_mtp_head(tmp_path, target, convention=MtpConvention()))
    for name, value in flat(head).items():
        assert mx.allclose(weights[name], value, rtol=0.07, atol=2e-3), name


def test_a_fused_projection_is_split(tmp_path: Path) -> None:
    config, target, head = make("mimo_v2_flash")
    tensors = head_tensors(LAYOUTS["mimo_v2_flash"], target, head)
    path = "model.mtp.layers.0.self_attn"
    rows = [tensors.pop(f"{path}.{each}_proj.weight") for each in "qkv"]
    tensors[f"{path}.qkv_proj.weight"] = mx.concatenate(rows)
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save(tmp_path / "mtp.safetensors", tensors)
    weights = flat(load_mtp_head(tmp_path, target, convention=MtpConvention()))
    for each, value in zip("qkv", rows, strict=True):
        name = f"layers.0.blocks.0.self_attn.{each}_proj.weight"
        assert mx.array_equal(weights[name], value)


def test_an_expert_too_many_is_refused() -> None:
    weights = {f"b.experts.{e}.up_proj.weight": mx.ones((4, 4)) for e in range(3)}
    with pytest.raises(ModelFolderError, match=r"not expected: b\.experts\.2"):
        transformed(weights, {"b.switch_mlp.up_proj.weight": (2, 4, 4)})


def test_a_projection_with_a_bias_keeps_it(tmp_path: Path) -> None:
    config, target, head = make("ernie4_5_moe")
    tensors = head_tensors(LAYOUTS["ernie4_5_moe"], target, head)
    tensors["model.mtp_linear_proj.0.bias"] = mx.arange(64) / 64
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save(tmp_path / "mtp.safetensors", tensors)
    loaded = load_mtp_head(tmp_path, target, convention=MtpConvention())
    assert mx.array_equal(loaded.layers[0].proj.bias, mx.arange(64) / 64)


def test_a_packing_that_mlx_does_not_know_is_refused(tmp_path: Path) -> None:
    config, target, head = make("mimo")
    tensors = head_tensors(LAYOUTS["mimo"], target, head)
    name = "model.mtp_layers.0.input_proj"
    tensors[f"{name}.weight"] = mx.zeros((64, 16), dtype=mx.uint32)
    tensors[f"{name}.scales"] = mx.zeros((64, 1), dtype=mx.uint8)
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save(tmp_path / "mtp.safetensors", tensors)
    with pytest.raises(ModelFolderError, match="mlx does not support"):
        load_mtp_head(tmp_path, target, convention=MtpConvention())

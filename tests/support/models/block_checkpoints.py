"""Tiny random DFlash2 and DSpark drafters, laid out on disk as real ones are.

block_checkpoints.json has an entry for each published packaging. Names of tensors and
keys are written out again here, so that tests notice wrong names in the library.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from support.models.dflash_checkpoints import (
    DIM,
    HEAD_DIM,
    HEADS,
    VOCAB,
    tensors_of,
)
from support.models.rows import Row, read_rows

BLOCK, RANK, TOP, GROUP = 4, 8, 6, 16
MASK = VOCAB - 1
DRAFT_IDS = list(range(1, VOCAB, 3))
Tensors = dict[str, mx.array]
Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Packaging:
    """Layout of a publisher's files."""

    kind: str  # "dflash", "dflash2" or "dspark"
    config: Callable[[tuple[int, ...]], Config]  # made from layer ids
    parts: tuple[str, ...] = ()  # beside the backbone, see `parts_of`
    depth: int = BLOCK  # largest number of drafted tokens
    write: str = "safetensors"  # or "nvfp4" (packed) or "gguf"
    names: dict[str, str] = field(default_factory=dict)  # prefix -> prefix in files


def _filled(template: Any, layers: tuple[int, ...]) -> Any:
    """Return a config with the tapped layers and the vocabulary size filled in."""
    if isinstance(template, dict):
        return {key: _filled(value, layers) for key, value in template.items()}
    if template == "layers":
        return list(layers)
    if template == "vocab":
        return VOCAB
    return [i + 1 for i in layers] if template == "layers + 1" else template


def _packaging(row: Row) -> Packaging:
    config, parts = partial(_filled, row["config"]), tuple(row.get("parts", ()))
    return Packaging(**{**row, "config": config, "parts": parts})


PACKAGINGS = {name: _packaging(row) for name, row in read_rows(__file__).items()}


class Draws:
    def __init__(self) -> None:
        self._rng = np.random.default_rng(1)

    def matrix(self, *shape: int, scale: float = 1.0) -> mx.array:
        """Return a matrix that maps numbers of size 1 to numbers of size `scale`."""
        values = self._rng.standard_normal(shape) * (scale / shape[-1] ** 0.5)
        return mx.array(values.astype(np.float32))

    def vector(self, size: int, mean: float = 1.0) -> mx.array:
        values = mean + 0.3 * self._rng.standard_normal(size)
        return mx.array(values.astype(np.float32))


def parts_of(packaging: Packaging, features: int) -> Tensors:
    """Return all tensors, under the names of DeepSpec and DFlash."""
    tensors, draws = tensors_of("full", features), Draws()
    parts = packaging.parts
    layers = [f"layers.{i}." for i in range(2)]
    columns = len(DRAFT_IDS) if "reduced" in parts else VOCAB
    if "own ends" in parts or "embedding" in parts:
        tensors["embed_tokens.weight"] = draws.matrix(VOCAB, DIM, scale=8.0)
    if "own ends" in parts or "reduced" in parts:
        tensors["lm_head.weight"] = draws.matrix(columns, DIM, scale=4.0)
    if "reduced" in parts:
        ids = np.array(DRAFT_IDS)
        tensors["d2t"] = mx.array(ids - np.arange(ids.size))
        tensors["t2d"] = mx.array(np.isin(np.arange(VOCAB), ids))
    for part in parts:
        if part.startswith("markov"):
            tensors |= _markov(draws, part.removeprefix("markov").strip(), columns)
    if "confidence" in parts or "confidence of states" in parts:
        wide = DIM + RANK if "confidence" in parts else DIM
        tensors["confidence_head.proj.weight"] = draws.matrix(1, wide, scale=3.0)
        tensors["confidence_head.proj.bias"] = draws.vector(1, 0.0)
    if "levels" in parts:
        for index, wide in enumerate((128, DIM), start=1):
            tensors[f"log_snr_fc{index}.weight"] = draws.matrix(DIM, wide)
            tensors[f"log_snr_fc{index}.bias"] = draws.vector(DIM, 0.0)
    for layer in layers:
        if "sinks" in parts:
            tensors[f"{layer}self_attn.attention_sink_bias"] = draws.vector(HEADS)
        if "gated" in parts:
            wide = 2 * HEADS * HEAD_DIM
            tensors[f"{layer}self_attn.q_proj.weight"] = draws.matrix(wide, DIM)
        if "convolutions" in parts:
            for name in ("attention_conv", "mlp_conv"):
                kernel = draws.matrix(2, 2, DIM, scale=4.0)
                tensors[f"{layer}{name}.base_kernel"] = kernel
                tensors[f"{layer}{name}.kernel_projection.weight"] = draws.matrix(
                    4 * (DIM // GROUP), DIM, scale=0.5
                )
        if "gemma" in parts:
            tensors |= _gemma_layer(draws, layer)
            del tensors[f"{layer}self_attn.v_proj.weight"]
    if "selector" in parts:
        for name in ("predecessor_codebook", "successor_codebook"):
            tensors[f"candidate_selector.{name}"] = draws.matrix(VOCAB, RANK, scale=3.0)
        projection = draws.matrix(RANK, DIM)
        tensors["candidate_selector.hidden_projection.weight"] = projection
    if "gated" in parts:  # norms are stored minus one
        tensors = {n: v - 1 if "norm" in n else v for n, v in tensors.items()}
    return tensors


def _markov(draws: Draws, kind: str, columns: int) -> Tensors:
    head = "markov_head."
    tensors = {
        f"{head}markov_w1.weight": draws.matrix(VOCAB, RANK, scale=4.0),
        f"{head}markov_w2.weight": draws.matrix(columns, RANK, scale=4.0),
    }
    if kind == "gated":
        tensors[f"{head}gate_proj.weight"] = draws.matrix(RANK, DIM + RANK)
        tensors[f"{head}gate_proj.bias"] = draws.vector(RANK, 0.0)
    elif kind == "rnn":
        wide = (3 * RANK, 2 * RANK + DIM)
        tensors[f"{head}joint_proj.weight"] = draws.matrix(*wide, scale=2.0)
        tensors[f"{head}joint_proj.bias"] = draws.vector(3 * RANK, 0.0)
    return tensors


def _gemma_layer(draws: Draws, layer: str) -> Tensors:
    size, attention = 2 * HEAD_DIM, f"{layer}self_attn."
    norms = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
    return {
        f"{attention}q_proj.weight": draws.matrix(HEADS * size, DIM),
        f"{attention}k_proj.weight": draws.matrix(size, DIM),
        f"{attention}o_proj.weight": draws.matrix(DIM, HEADS * size),
        f"{attention}q_norm.weight": draws.vector(size),
        f"{attention}k_norm.weight": draws.vector(size),
        **{f"{layer}{name}.weight": draws.vector(DIM) for name in norms},
        f"{layer}layer_scalar": draws.vector(1),
    }


def altered(
    name: str, *parts: str, inner: Config | None = None, **keys: Any
) -> Packaging:
    """Return a packaging with other parts or keys; `inner`: keys of `dflash_config`."""
    old = PACKAGINGS[name]

    def config(layers: tuple[int, ...]) -> Config:
        made = {**old.config(layers), **keys}
        if "dflash_config" in made:
            return {**made, "dflash_config": {**made["dflash_config"], **(inner or {})}}
        return {**made, **(inner or {})}

    return replace(old, config=config, parts=parts or old.parts)


def write_block(
    folder: Path,
    name: str | Packaging,
    layers: tuple[int, ...] = (0, 1, 3),
    **changed: mx.array,
) -> Path:
    """Write a drafter, with some tensors replaced by `changed`; return its folder."""
    packaging = PACKAGINGS[name] if isinstance(name, str) else name
    folder.mkdir(parents=True, exist_ok=True)
    config, tensors = packaging.config(layers), parts_of(packaging, len(layers))
    tensors |= changed
    if packaging.write == "nvfp4":
        tensors = packed(tensors)
    tensors = {_named(each, packaging.names): v for each, v in tensors.items()}
    if packaging.write == "gguf":
        kept: dict[str, Any] = {
            k: v if isinstance(v, str) else mx.array(v) for k, v in config.items()
        }
        mx.save_gguf(str(folder / "drafter.gguf"), tensors, kept)
        return folder
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    mx.save_safetensors(
        str(folder / "model.safetensors"), tensors, metadata={"format": "pt"}
    )
    return folder


def _named(name: str, names: dict[str, str]) -> str:
    for ours, theirs in names.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def packed(tensors: Tensors) -> Tensors:
    """Return tensors with the weights of the layers' projections packed as NVFP4."""
    result: Tensors = {}
    for name, value in tensors.items():
        part = name.removesuffix(".weight")
        if not (part.startswith("layers.") and part.endswith("_proj")):
            result[name] = value
            continue
        whole = mx.abs(value).max() / 6
        scale = mx.to_fp8(mx.ones((value.shape[0], value.shape[1] // 16)))
        sizes = mx.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        near = mx.argmin(mx.abs(mx.abs(value / whole)[..., None] - sizes), axis=-1)
        codes = (near + mx.where(value < 0, 8, 0)).astype(mx.uint8)
        result[name] = codes[:, ::2] | (codes[:, 1::2] << 4)
        result[f"{part}.weight_scale"] = scale
        result[f"{part}.weight_scale_2"] = whole
    return result

"""Tiny random checkpoints with an MTP head, laid out on disk as real ones are.

The JSON table beside this file repeats the names of the heads' tensors, so that a wrong
name in the library's table is noticed. Targets are those of the census.
"""

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_speculation.models.checkpoints.convention import MtpConvention
from mlx_speculation.models.mtp.families import arguments_of, family_of
from mlx_speculation.models.mtp.family import MtpFamily
from mlx_speculation.models.mtp.files import HeadFiles, Stored
from mlx_speculation.models.mtp.head import MtpHead
from mlx_speculation.models.mtp.load import (
    _build,
    build_mtp_head,
    decided,
    find_mtp_head,
)
from support.models import census, tiny_models
from support.models.rows import read_rows
from support.models.tiny_tokenizer import byte_tokenizer

Weights = dict[str, mx.array]


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a family's checkpoints.

    `names` and `block_names` map our names of parts to names in files. In these, {k} is
    the index of a layer of the head, {n} is {k} plus the number of the target's layers,
    {b} is the index of a block. `copies` maps names in files to the tensors of the
    target that they copy.
    """

    module: str  # the target's module in mlx_lm.models
    names: Mapping[str, str]
    config: Mapping[str, Any] = field(default_factory=dict)  # keys of config.json
    layers: int = 1  # number of the head's layers
    copies: Mapping[str, str] = field(default_factory=dict)
    plus_one: bool = False  # norms are stored minus one
    fused: bool = False  # experts are stored in one tensor
    block_names: Mapping[str, str] = field(default_factory=dict)


LAYOUTS = {name: Layout(**row) for name, row in read_rows(__file__).items()}

# Layouts that cover all kinds of stored norms, experts, caches, layers and their order,
# own embeddings or output layers, and blocks.
EACH_KIND = (
    *("qwen3_5_moe", "deepseek_v32", "mimo_v2_flash", "ernie4_5_moe"),
    *("longcat_flash", "nemotron_h", "step3p5", "bailing_hybrid"),
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Written files, and the target and the head whose weights they hold."""

    folder: Path
    layout: Layout
    config: dict[str, Any]  # content of config.json
    target: nn.Module
    head: MtpHead
    tensors: Weights  # of the head, by their names in the files


def config_of(module: str) -> dict[str, Any]:
    row = census.BUILT[module]
    if row.tiny is not None:
        args = dict(tiny_models.TINY_MODELS[row.tiny].args)
        if "time_step_limit" in args:
            args["time_step_limit"] = [float(each) for each in args["time_step_limit"]]
        return args
    assert row.args is not None
    common = census.COMMON
    args = {"model_type": module, **common, **row.args}
    if "text_config" in row.args:
        args["text_config"] = {**common, **row.args["text_config"]}
    return args


def make(name: str, *, seed: int = 0) -> tuple[dict[str, Any], nn.Module, MtpHead]:
    layout = LAYOUTS[name]
    config = config_of(layout.module)
    if "text_config" in config:
        config["text_config"] = {**config["text_config"], **layout.config}
    else:
        config |= layout.config
    imported = importlib.import_module(f"mlx_lm.models.{layout.module}")
    mx.random.seed(seed)  # The constructors draw from the global generator.
    target = cast(nn.Module, imported.Model(imported.ModelArgs.from_dict(config)))
    tiny_models.randomise(target, embedding=tiny_models.embedding_scale(layout.module))
    head = make_head(layout, target, config)
    tiny_models.randomise(head, embedding=tiny_models.embedding_scale(layout.module))
    return config, target, head


def family(layout: Layout) -> MtpFamily:
    result = family_of(f"mlx_lm.models.{layout.module}")
    assert result is not None
    return result


def make_head(layout: Layout, target: nn.Module, config: dict[str, Any]) -> MtpHead:
    """Return a head with initial weights."""
    kind, last = family(layout), Stored(Path(), "")
    files = HeadFiles({f"layers.{layout.layers - 1}.": last}, False, "")
    return _build(kind, kind.convention, arguments_of(target), config, files)


def read_mtp_head(
    folder: Path, model: nn.Module, *, convention: MtpConvention | None = None
) -> MtpHead:
    """Read a head in its stored precision, without probing conventions."""
    head_files = find_mtp_head(folder, model)
    return build_mtp_head(head_files, model, decided(convention, head_files))[0]


def flat(module: nn.Module) -> Weights:
    return dict(cast(list[tuple[str, mx.array]], tree_flatten(module.parameters())))


def head_tensors(
    layout: Layout, target: nn.Module, head: MtpHead, *, raw: bool = True
) -> Weights:
    """Return the head's tensors under the names of the original files.

    With `raw` they have the form of the original files too. Otherwise they have the
    form of mlx-lm's modules, as beside a converted target.
    """
    trunk, tensors = len(target.layers), dict[str, mx.array]()
    for name, value in flat(head).items():
        _, layer, part, *rest = name.split(".")
        numbers = {"k": int(layer), "n": trunk + int(layer), "b": 0}
        if part == "blocks":
            part, numbers["b"], rest = "block", int(rest[0]), rest[1:]
        inner = ".".join(rest)
        for ours, theirs in layout.block_names.items():
            if part == "block" and inner.startswith(ours):
                inner = theirs + inner.removeprefix(ours)
        tensors[f"{layout.names[part].format(**numbers)}.{inner}"] = value
    if raw:
        tensors = as_original(layout, tensors)
    weights = flat(target)
    for k in range(layout.layers):
        for copy, source in layout.copies.items():
            tensors[copy.format(n=trunk + k)] = weights[source]
    return tensors


def trunk_tensors(layout: Layout, target: nn.Module) -> Weights:
    tensors = as_original(layout, flat(target))
    if layout.module.startswith("qwen3_5"):
        tensors = {
            name.replace("language_model.model.", "model.language_model.").replace(
                "language_model.lm_head.", "lm_head."
            ): value
            for name, value in tensors.items()
        }
    if layout.module == "step3p5":
        tensors = {_step_name(name): value for name, value in tensors.items()}
    return tensors


def _step_name(name: str) -> str:
    for ours, theirs in (
        (".mlp.switch_mlp.", ".moe."),
        (".mlp.gate.gate.", ".moe.gate."),
        (".mlp.gate.router_bias", ".moe.router_bias"),
        (".mlp.share_expert.", ".share_expert."),
    ):
        name = name.replace(ours, theirs)
    return name


def as_original(layout: Layout, weights: Weights) -> Weights:
    """Return weights of mlx-lm's modules, in the form of the original files."""
    tensors: Weights = {}
    for name, value in weights.items():
        path, _, part = name.rpartition(".")
        if path.endswith(".embed_q"):
            values = weights[name.replace("embed_q", "unembed_out")]
            both = mx.concatenate([value.swapaxes(-1, -2), values], axis=1)
            tensors[name.replace("embed_q", "kv_b_proj")] = both.flatten(0, 1)
        elif path.endswith(".unembed_out"):
            continue
        elif ".switch_mlp." in name and layout.module != "step3p5":
            tensors |= _experts(layout, weights, path, part, value)
        elif "conv1d" in path and value.ndim == 3:
            tensors[name] = value.moveaxis(1, 2)
        elif layout.plus_one and _is_norm(name) and "linear_attn" not in name:
            tensors[name] = value - 1
        elif name.startswith("model.layers.") and path.endswith("mlp.gate.gate_proj"):
            tensors[name.replace("gate.gate_proj", "gate")] = value
        else:
            tensors[name] = value
    return tensors


def _is_norm(name: str) -> bool:
    return name.endswith("norm.weight") or "pre_fc_norm" in name


def _experts(
    layout: Layout, weights: Weights, path: str, part: str, value: mx.array
) -> Weights:
    block, _, projection = path.partition(".switch_mlp.")
    if layout.fused:
        if projection == "down_proj":
            return {f"{block}.experts.down_proj": value}
        if projection == "up_proj":
            return {}
        up = weights[f"{block}.switch_mlp.up_proj.weight"]
        both = mx.concatenate([value, up], axis=1)
        return {f"{block}.experts.gate_up_proj": both}
    theirs = {"fc1": "up_proj", "fc2": "down_proj"}.get(projection, projection)
    return {f"{block}.experts.{e}.{theirs}.{part}": value[e] for e in range(len(value))}


def write(folder: Path, name: str, *, seed: int = 0) -> Checkpoint:
    """Write a checkpoint as it is published: shards, an index, raw tensors."""
    layout = LAYOUTS[name]
    config, target, head = make(name, seed=seed)
    tensors = head_tensors(layout, target, head)
    trunk = trunk_tensors(layout, target)
    write_folder(folder, config, [trunk, tensors])
    return Checkpoint(folder, layout, config, target, head, tensors)


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    parts: list[Weights],
    *,
    kind: str = "pt",
    index: bool = True,
) -> None:
    """Write config.json, a tokenizer, a shard for each part, and an index of them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    byte_tokenizer()._tokenizer.save_pretrained(folder)
    weight_map: dict[str, str] = {}
    for i, weights in enumerate(parts, 1):
        file = f"model-{i:05}-of-{len(parts):05}.safetensors"
        save(folder / file, weights, kind=kind)
        weight_map |= dict.fromkeys(weights, file)
    if index:
        text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def write_tiny(
    folder: Path, name: str = "llama", layers: int | None = None
) -> nn.Module:
    model = tiny_models.build(name, layers=layers)
    args = tiny_models.TINY_MODELS[name].args
    args = args if layers is None else {**args, "num_hidden_layers": layers}
    write_folder(folder, args, [flat(model)])
    return model


def save(file: Path, weights: Weights, *, kind: str = "pt") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(file), weights, metadata={"format": kind})

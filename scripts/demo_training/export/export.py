"""Checkpoints as mlx-lm reads them, written from torch and read back."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from demo_training.data.vocabulary import END_ID, PAD_ID
from demo_training.export.affine import dequantize, quantize
from demo_training.nets.networks import Network, PredictionHead
from demo_training.nets.shapes import Shape, config

PREFIX = {"qwen3": "model.", "gemma3_text": "model."}
# Float32 in the file: rounding A_log changes the decay of long memories.
KEPT_FLOAT = ("A_log", "dt_bias")


def prefix(shape: Shape) -> str:
    """What stands before a trunk parameter's name in the file."""
    return PREFIX.get(shape.family, "language_model.model.")


def export(network: Network, folder: Path) -> None:
    """Writes `config.json`, `generation_config.json` and `model.safetensors`."""
    shape = network.shape
    folder.mkdir(parents=True, exist_ok=True)
    settings = config(shape)
    settings["quantization"] = {"group_size": shape.group, "bits": shape.bits}
    ends = {"eos_token_id": END_ID, "pad_token_id": PAD_ID, "do_sample": False}
    tensors = tensors_of(network, prefix(shape), shape)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "mlx"})
    for name, content in (("config", settings), ("generation_config", ends)):
        text = json.dumps(content, indent=2) + "\n"
        (folder / f"{name}.json").write_text(text, encoding="utf-8")


def tensors_of(module: nn.Module, start: str, shape: Shape) -> dict[str, Tensor]:
    """A module's parameters, quantized, under the file's names."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in module.state_dict().items():
        value = parameter.detach().float().cpu().contiguous()
        if shape.family == "gemma3_text" and "norm" in name:
            value = value - 1
        if name.endswith(KEPT_FLOAT):
            tensors[start + name] = value
        elif value.ndim != 2:
            tensors[start + name] = value.half()
        else:
            words, scales, biases = quantize(value.numpy(), shape.bits, shape.group)
            stem = start + name.removesuffix("weight")
            tensors[stem + "weight"] = torch.from_numpy(words)
            tensors[stem + "scales"] = torch.from_numpy(scales).half()
            tensors[stem + "biases"] = torch.from_numpy(biases).half()
    return tensors


def restore(module: nn.Module, file: Path, start: str, shape: Shape) -> None:
    """Loads what the file holds, dequantized, into a module."""
    with safe_open(file, "pt") as opened:
        raw = {
            name.removeprefix(start): opened.get_tensor(name)
            for name in opened.keys()  # noqa: SIM118, the reader is no mapping
            if name.startswith(start)
        }
    state: dict[str, Tensor] = {}
    for name in module.state_dict():
        value = raw[name]
        stem = name.removesuffix("weight")
        if stem + "scales" in raw:
            parts = (raw[stem + part].float().numpy() for part in ("scales", "biases"))
            scales, biases = parts
            full = dequantize(value.numpy(), scales, biases, shape.bits, shape.group)
            value = torch.from_numpy(full)
        elif shape.family == "gemma3_text" and "norm" in name:
            value = value.float() + 1
        state[name] = value.float()
    module.load_state_dict(state)


def load_network(shape: Shape, folder: Path, device: str) -> Network:
    """An exported model in torch, with the weights that its users will have."""
    network = Network(shape)
    restore(network, folder / "model.safetensors", prefix(shape), shape)
    network.to(device).eval().requires_grad_(False)
    return network


def add_head(head: PredictionHead, shape: Shape, folder: Path) -> None:
    """Writes the head beside the trunk's tensors, which stay as they are."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    kept = {n: t for n, t in tensors.items() if not n.startswith("mtp.")}
    kept |= tensors_of(head, "mtp.", shape)
    save_file(kept, file, metadata={"format": "mlx"})

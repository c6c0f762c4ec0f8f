"""The checkpoint of an EAGLE-3 head, written from torch and read back."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from demo_training.data.vocabulary import VOCABULARY
from demo_training.export.affine import dequantize, quantize
from demo_training.nets.eagle_network import EagleHead
from demo_training.nets.shapes import CONTEXT, EPSILON, SHAPES, Shape

SHAPE = Shape("eagle", "qwen3", 1, 512, 576, 8, 2, bits=8)
# Outputs of these layers of the target, counted from 0.
LAYERS = (1, 3, 5)


def export_eagle(head: EagleHead, ids: Tensor, folder: Path) -> None:
    """Writes `config.json` and `model.safetensors` in the layout of EAGLE-3 heads."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, parameter in head.state_dict().items():
        value = parameter.detach().float().cpu()
        if value.ndim == 1:
            tensors[name] = value.half()
            continue
        words, scales, biases = quantize(value.numpy(), SHAPE.bits, SHAPE.group)
        stem = name.removesuffix("weight")
        tensors[name] = torch.from_numpy(words)
        tensors[stem + "scales"] = torch.from_numpy(scales).half()
        tensors[stem + "biases"] = torch.from_numpy(biases).half()
    known = torch.zeros(VOCABULARY, dtype=torch.bool)
    known[ids.cpu()] = True
    tensors |= {"t2d": known, "d2t": ids.cpu() - torch.arange(len(ids))}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "mlx"})
    text = json.dumps(eagle_config(len(ids)), indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def eagle_config(ids: int) -> dict[str, object]:
    """The head's `config.json`."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": SHAPE.hidden,
        "target_hidden_size": SHAPES["dense"].hidden,
        "num_hidden_layers": 1,
        "intermediate_size": SHAPE.mlp,
        "num_attention_heads": SHAPE.heads,
        "num_key_value_heads": SHAPE.kv_heads,
        "head_dim": SHAPE.head_dim,
        "rms_norm_eps": EPSILON,
        "rope_theta": SHAPE.rope_base,
        "max_position_embeddings": CONTEXT,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": ids,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(LAYERS),
        },
        "quantization": {"group_size": SHAPE.group, "bits": SHAPE.bits},
    }


def restored(folder: Path, device: str) -> EagleHead:
    """An exported head, with the weights that its users will have."""
    with safe_open(folder / "model.safetensors", "pt") as opened:
        raw = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    head = EagleHead(SHAPE, len(LAYERS), len(raw["d2t"]))
    state: dict[str, Tensor] = {}
    for name in head.state_dict():
        stem = name.removesuffix("weight")
        value = raw[name]
        if stem + "scales" in raw:
            scales = raw[stem + "scales"].float().numpy()
            biases = raw[stem + "biases"].float().numpy()
            full = dequantize(value.numpy(), scales, biases, SHAPE.bits, SHAPE.group)
            value = torch.from_numpy(full)
        state[name] = value.float()
    head.load_state_dict(state)
    head.to(device)
    return head

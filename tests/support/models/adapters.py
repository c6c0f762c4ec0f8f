"""Adapters as mlx_lm.lora writes them."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_speculation import demo_models, load

LORA: dict[str, Any] = {"rank": 4, "scale": 20.0, "dropout": 0.0}


def write_adapter(folder: Path) -> Path:
    """Write a random adapter of the last layer of the bundled draft model."""
    model, _ = load(demo_models()["draft"])
    model.freeze()
    linear_to_lora_layers(model, 1, LORA)
    mx.random.seed(0)
    trainable: Any = tree_flatten(model.trainable_parameters())
    weights = {name: 0.05 * mx.random.normal(value.shape) for name, value in trainable}
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    config = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": LORA}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder

"""The bundled models' weights in transformers' classes: torch, float32, on the CPU.

transformers cannot read the bundled models, which are quantized in mlx-lm's layout. So
the weights come from the loaded mlx-lm model. The two models must give equal logits.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model, load_model
from transformers import AutoConfig, AutoModelForCausalLM

# The largest difference of two logits that counts as equal.
TOLERANCE = 1e-3
# Norms that multiply by 1 + weight in transformers, and by the weight in mlx-lm.
_NORMS = ("layernorm.weight", "model.norm.weight", "q_norm.weight", "k_norm.weight")


class UnlikeError(Exception):
    """Raised when transformers has no class for a model, or computes other logits."""


@dataclass(frozen=True, slots=True)
class Twin:
    model: Any
    difference: float  # largest difference of a logit from mlx-lm's


def load_twin(folder: Path, text: list[int]) -> Twin:
    """Load a bundled model in transformers' class; raise `UnlikeError` if it fails."""
    original = _in_float32(folder)
    settings = json.loads((folder / "config.json").read_text("utf-8"))
    text_settings = settings.get("text_config", settings)
    text_settings = {k: v for k, v in text_settings.items() if k != "quantization"}
    try:
        config = AutoConfig.for_model(**text_settings)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        state = _state(original, config.model_type)
        missing = model.load_state_dict(state, strict=False)
        model.tie_weights()
    except (ValueError, KeyError, RuntimeError) as error:
        raise UnlikeError(f"{type(error).__name__}: {error}") from error
    absent = set(missing.missing_keys) - {"lm_head.weight"}
    if absent or missing.unexpected_keys:
        raise UnlikeError(f"other parameters: {absent or missing.unexpected_keys}")
    model.eval().requires_grad_(False)
    if config.model_type == "gemma3_text":  # mlx-lm rounds this factor to bfloat16
        factor = model.model.embed_tokens.embed_scale
        factor.copy_(factor.bfloat16())
    with torch.inference_mode():
        theirs = model(torch.tensor([text])).logits[0].numpy()
    ours = np.array(original(mx.array([text]))[0].astype(mx.float32))
    difference = float(np.abs(theirs - ours).max())
    if not difference <= TOLERANCE:
        raise UnlikeError(f"logits differ by {difference:.2g}, more than {TOLERANCE:g}")
    return Twin(model, difference)


def _in_float32(folder: Path) -> Any:
    model: Any = load_model(folder)[0]
    if any(isinstance(m, nn.QuantizedLinear) for _, m in model.named_modules()):
        model = dequantize_model(model)
    model.set_dtype(mx.float32)
    return model


def _state(model: Any, kind: str) -> dict[str, torch.Tensor]:
    """Return the parameters under transformers' names, in their layout."""
    parameters: Any = tree_flatten(model.parameters())
    state = {}
    for name, array in parameters:
        value = torch.from_numpy(np.array(array.astype(mx.float32)))
        if kind == "qwen3_5_text":
            name = name.removeprefix("language_model.")
            if name.endswith("conv1d.weight"):
                value = value.movedim(2, 1)
            elif name.endswith(_NORMS):
                value = value - 1
        state[name] = value.contiguous()
    return state

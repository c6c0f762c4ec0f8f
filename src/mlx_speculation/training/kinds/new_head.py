"""Base of drafters that begin with random weights; the target gives their sizes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map
from numpy.typing import NDArray

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import HiddenStates
from mlx_speculation.models.checkpoints.rotation import read_rotation
from mlx_speculation.training.kinds.packing import id_tensors, packed, write_draft
from mlx_speculation.training.kinds.trainee import Trainee

SPREAD = 0.02  # standard deviation of random matrices


class NewHead(Trainee):
    """A drafter that reads the outputs of some of its target's layers.

    `ids` are the token ids that it can draft; None: all, by the target's output layer.
    With `after_norm` it reads the last layer after the target's final norm.
    """

    _config: dict[str, Any]  # the drafter's config.json

    def __init__(
        self,
        model: nn.Module,
        ids: NDArray[np.int64] | None,
        layers: Sequence[int],
        *,
        after_norm: bool,
    ) -> None:
        self.layers = tuple(sorted(layers))
        if len(set(layers)) < len(layers) or not layers:
            raise InvalidRequestError(
                f"layers is {list(layers)}; it must name at least 1 layer, and none "
                "twice."
            )
        self.taps: HiddenStates = HiddenStates(
            model, layers=self.layers, after_norm=after_norm
        )
        self.ids = None if ids is None else mx.array(ids.astype(np.uint32))

    def save(self, folder: Path, bits: int | None) -> None:
        """Write config.json and model.safetensors."""
        tensors, quantization = packed(self.module, bits)
        if self.ids is not None:
            tensors |= id_tensors(self.ids, self._config["vocab_size"])
        config = self._config | quantization
        write_draft(folder, tensors, config, "mlx" if bits else "pt")


def layer_sizes(config: dict[str, Any], dim: int) -> dict[str, Any]:
    """Return a head's config.json entries for layers of the target's sizes."""

    def number(key: str, default: int) -> int:
        value = config.get(key)
        return value if isinstance(value, int) and value > 0 else default

    heads = number("num_attention_heads", max(1, dim // 64))
    return {
        "hidden_act": "silu",
        "hidden_size": dim,
        "intermediate_size": number("intermediate_size", 3 * dim),
        "num_attention_heads": heads,
        "num_key_value_heads": number("num_key_value_heads", heads),
        "head_dim": number("head_dim", dim // heads),
        "rms_norm_eps": 1e-5,
        "rope_theta": read_rotation(config, "target").theta,
        "max_position_embeddings": number("max_position_embeddings", 4096),
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
    }


def draw_matrices(module: nn.Module, seed: int) -> None:
    """Replace all matrices of a module by random ones."""
    mx.random.seed(seed)

    def drawn(value: mx.array) -> mx.array:
        return SPREAD * mx.random.normal(value.shape) if value.ndim > 1 else value

    module.update(tree_map(drawn, module.parameters()))


def begin_head(head: Any, taps: HiddenStates, ids: mx.array | None, seed: int) -> None:
    """Copy the target's last norm and output rows; draw a head's other matrices.

    `ids`: the target's id of each output row; None: the head has no output layer.
    """
    draw_matrices(head, seed)
    output: Any = taps.parts.output
    if ids is not None and output is not None and "weight" in output:
        head.lm_head.weight = output_rows(output, ids)
    norm: Any = taps.parts.norm
    weight = None if norm is None else norm.get("weight")
    if weight is not None and weight.shape == head.norm.weight.shape:
        # The norm is applied to ones, since some norms store their factors minus one.
        factors = norm(mx.ones((1, 1, weight.size), weight.dtype))[0, 0]
        head.norm.weight = factors.astype(mx.float32)
    mx.eval(head.parameters())


def output_rows(layer: Any, ids: mx.array) -> mx.array:
    """Return rows of an output layer or embedding in float32."""
    rows: mx.array = layer.weight[ids]
    if "scales" in layer:
        form = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
        biases = None if layer.get("biases") is None else layer.biases[ids]
        rows = mx.dequantize(rows, layer.scales[ids], biases, **form)
    return rows.astype(mx.float32)

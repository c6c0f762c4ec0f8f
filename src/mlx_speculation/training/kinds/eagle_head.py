"""A new EAGLE-3 head for a target, and its files in the dialect that engines share.

SGLang, SpecForge and vLLM read it: numbers of layers stand in `eagle_config`, the state
before the last norm is recycled, and each tapped layer has a norm of its own before
`fc` (EAGLE-3.1).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map
from numpy.typing import NDArray

from mlx_speculation.errors import InvalidRequestError, UnsupportedModelError
from mlx_speculation.models import HiddenStates, States, find_parts, logit_width
from mlx_speculation.models.checkpoints.joined_head import OwnEnds
from mlx_speculation.models.config_json import text_config
from mlx_speculation.models.eagle import Eagle, EagleHead
from mlx_speculation.models.eagle.config import read_settings
from mlx_speculation.training.kinds.packing import packed, write_tensors
from mlx_speculation.training.unroll import Made, Read, attend_split, unroll

_SPREAD = 0.02  # of matrices that begin at random


class EagleTrainee:
    """An EAGLE-3 head that is trained.

    Args:
        model: the target.
        config: what the target's config.json holds.
        ids: the ids to draft from, in order.
        layers: whose outputs it reads; None: the usual three.
        seed: of the weights that begin at random.

    Raises:
        UnsupportedModelError: the target does not show its layers, embedding or norm.
        InvalidRequestError: it has no such layer.
    """

    kind = "eagle"
    first = 2
    most: int | None = None

    def __init__(
        self,
        model: nn.Module,
        config: dict[str, Any],
        ids: NDArray[np.int64],
        layers: Sequence[int] | None,
        seed: int,
    ) -> None:
        parts = find_parts(model)
        parts.require("layers", "norm", "embedding")
        count = len(parts.layers)
        self.layers = usual_layers(count) if layers is None else tuple(layers)
        if len(set(self.layers)) < len(self.layers) or not self.layers:
            raise InvalidRequestError(
                f"layers are {list(self.layers)}, and different ones are needed."
            )
        self.layers = tuple(sorted(self.layers))
        self.taps = HiddenStates(model, layers=self.layers)
        self._ids = ids
        self.ids = mx.array(ids.astype(np.uint32))
        self._config = head_config(
            text_config(config), parts.dim, logit_width(model), len(ids), self.layers
        )
        self.module = EagleHead(
            read_settings(self._config),
            len(self.layers),
            OwnEnds(self.ids, len(ids)),
            norms=frozenset({"each"}),
        )
        attend_split(self.module.midlayer.self_attn)
        self._begin(model, seed)
        self.eagle = Eagle(self.module, self.taps, self.layers)

    def read(self, states: States) -> list[mx.array]:
        """Return the outputs of the layers."""
        return [states.layer(index) for index in self.layers]

    def run(
        self,
        inputs: list[mx.array],
        tokens: mx.array,
        depths: int,
        read: Read[Made],
        *,
        checkpoint: bool = False,
    ) -> list[Made]:
        """Draft from all slots; see `Trainee.run`."""
        n = tokens.shape[1] - depths - 1
        hidden = self.module.joined([each[:, :n] for each in inputs])
        return unroll(
            self.eagle, hidden, tokens[:, 1:], depths, read, checkpoint=checkpoint
        )

    def save(self, folder: Path, bits: int | None) -> None:
        """Write config.json and model.safetensors."""
        tensors, quantization = packed(self.module, bits)
        width = self._config["vocab_size"]
        known = np.zeros(width, np.bool_)
        known[self._ids] = True
        tensors |= {
            "d2t": mx.array(self._ids - np.arange(len(self._ids))),
            "t2d": mx.array(known),
        }
        config = self._config | quantization
        write_tensors(folder, tensors, "mlx" if bits else "pt")
        text = json.dumps(config, indent=2) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")

    def source(self, folder: Path) -> Any:
        """Return the folder: a generator loads it."""
        return str(folder)

    def _begin(self, model: nn.Module, seed: int) -> None:
        """Take the target's way from states to logits, and random matrices."""
        key = mx.random.key(seed)

        def drawn(value: mx.array) -> mx.array:
            nonlocal key
            if value.ndim < 2:
                return mx.ones_like(value)
            key, own = mx.random.split(key)
            return _SPREAD * mx.random.normal(value.shape, key=own)

        self.module.update(tree_map(drawn, self.module.parameters()))
        rows = output_rows(self.taps, self.ids)
        if rows is not None:
            self.module.lm_head.weight = rows
        norm = self.taps.parts.norm
        weight = None if norm is None else norm.get("weight")
        if weight is not None and weight.shape == self.module.norm.weight.shape:
            self.module.norm.weight = applied_weight(norm, weight)
        mx.eval(self.module.parameters())


def usual_layers(count: int) -> tuple[int, ...]:
    """Return the layers that SpecForge's heads read: an early, a middle, a late one.

    Raises:
        UnsupportedModelError: there are too few.
    """
    found = sorted({min(1, count - 1), count // 2 - 1, count - 4} - {-1})
    if count < 6:
        found = list(range(count))
    if len(found) < 2:
        raise UnsupportedModelError(
            f"The target has {count} layers, and an EAGLE-3 head reads at least 2. "
            "Choose another kind of draft."
        )
    return tuple(found)


def head_config(
    config: dict[str, Any],
    dim: int,
    vocab: int,
    ids: int,
    layers: Sequence[int],
) -> dict[str, Any]:
    """Return the config.json of a head: one layer of the target's sizes."""

    def number(key: str, default: int) -> int:
        value = config.get(key)
        return value if isinstance(value, int) and value > 0 else default

    heads = number("num_attention_heads", max(1, dim // 64))
    rope = config.get("rope_parameters")
    base = config.get("rope_theta", (rope or {}).get("rope_theta", 10_000.0))
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": dim,
        "target_hidden_size": dim,
        "num_hidden_layers": 1,
        "intermediate_size": number("intermediate_size", 3 * dim),
        "num_attention_heads": heads,
        "num_key_value_heads": number("num_key_value_heads", heads),
        "head_dim": number("head_dim", dim // heads),
        "rms_norm_eps": 1e-5,
        "rope_theta": float(base),
        "max_position_embeddings": number("max_position_embeddings", 4096),
        "vocab_size": vocab,
        "draft_vocab_size": ids,
        "num_aux_hidden_states": len(layers),
        "fc_norm": True,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(layers),
        },
    }


def output_rows(taps: HiddenStates, ids: mx.array) -> mx.array | None:
    """Return the target's output matrix for ids in float32, if it shows one."""
    layer: Any = taps.parts.output
    if layer is None or "weight" not in layer:
        return None
    if "scales" in layer:
        form = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
        biases = layer.get("biases")
        rows = mx.dequantize(
            layer.weight[ids],
            layer.scales[ids],
            None if biases is None else biases[ids],
            **form,
        )
    else:
        rows = layer.weight[ids]
    return rows.astype(mx.float32)


def applied_weight(norm: Any, weight: mx.array) -> mx.array:
    """Return what a norm multiplies by: some store it less one."""
    probe = mx.ones((1, 1, weight.shape[0]), mx.float32)
    scaled: mx.array = norm(probe.astype(weight.dtype))[0, 0]
    return scaled.astype(mx.float32)

"""A new EAGLE-3 head for a target, and its files in a dialect that engines share.

SGLang, SpecForge and vLLM read this dialect. `eagle_config` lists the layers, the head
recycles the state before the last norm, and each tapped layer has a norm of its own
before `fc` (EAGLE-3.1).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from mlx_speculation.errors import InvalidRequestError, UnsupportedModelError
from mlx_speculation.models import HiddenStates, States, find_parts, logit_width
from mlx_speculation.models.checkpoints.joined_head import OwnEnds
from mlx_speculation.models.config_json import text_config
from mlx_speculation.models.eagle import Eagle, EagleHead
from mlx_speculation.models.eagle.config import read_settings
from mlx_speculation.training.kinds.new_head import begin_head, layer_sizes
from mlx_speculation.training.kinds.packing import id_tensors, packed, write_draft
from mlx_speculation.training.kinds.trainee import FADING, Recorded
from mlx_speculation.training.unroll import Made, Read, attend_split, unroll


class EagleTrainee:
    """An EAGLE-3 head in training.

    Args:
        model: the target.
        config: the content of the target's config.json.
        ids: the token ids to draft, in order.
        layers: the layers of the target to read; None: the usual three.
        seed: the seed of the random initial weights.

    Raises:
        UnsupportedModelError: the layers, embedding or norm of the target were not
            found.
        InvalidRequestError: the target has no such layer.
    """

    kind = "eagle"
    first = 2
    most: int | None = None
    fading = FADING

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
        begin_head(self.module, self.taps, self.ids, seed)
        self.eagle = Eagle(self.module, self.taps, self.layers)

    def read(self, states: States) -> list[mx.array]:
        """Return the states that the head reads: the outputs of its layers."""
        return [states.layer(index) for index in self.layers]

    def run(self, text: Recorded, read: Read[Made]) -> list[Made]:
        """Draft from all slots of a text; see `Trainee.run`."""
        n = text.tokens.shape[1] - text.depths - 1
        hidden = self.module.joined([each[:, :n] for each in text.inputs])
        tokens, checkpoint = text.tokens[:, 1:], text.checkpoint
        return unroll(
            self.eagle, hidden, tokens, text.depths, read, checkpoint=checkpoint
        )

    def save(self, folder: Path, bits: int | None) -> None:
        """Write config.json and model.safetensors."""
        tensors, quantization = packed(self.module, bits)
        tensors |= id_tensors(self._ids, self._config["vocab_size"])
        config = self._config | quantization
        write_draft(folder, tensors, config, "mlx" if bits else "pt")

    def source(self, folder: Path) -> Any:
        """Return the value of `draft=` for a generator: the folder."""
        return str(folder)


def usual_layers(count: int) -> tuple[int, ...]:
    """Return the layers that SpecForge's heads read: an early, a middle, a late one.

    Raises:
        UnsupportedModelError: the target has too few layers.
    """
    result = sorted({min(1, count - 1), count // 2 - 1, count - 4} - {-1})
    if count < 6:
        result = list(range(count))
    if len(result) < 2:
        raise UnsupportedModelError(
            f"The target has {count} layers, and an EAGLE-3 head reads at least 2. "
            "Choose another kind of draft."
        )
    return tuple(result)


def head_config(
    config: dict[str, Any],
    dim: int,
    vocab: int,
    ids: int,
    layers: Sequence[int],
) -> dict[str, Any]:
    """Return the config.json of a head: one layer of the target's sizes."""
    return layer_sizes(config, dim) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "target_hidden_size": dim,
        "num_hidden_layers": 1,
        "vocab_size": vocab,
        "draft_vocab_size": ids,
        "num_aux_hidden_states": len(layers),
        "fc_norm": True,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(layers),
        },
    }

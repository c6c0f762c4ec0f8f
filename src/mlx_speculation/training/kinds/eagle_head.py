"""A new EAGLE-3 head for a target, and its files in a dialect that engines share.

SGLang, SpecForge and vLLM read this dialect. The head feeds back its state before its
last norm. Each tapped layer has a norm of its own before `fc` (EAGLE-3.1).
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from mlx_speculation.errors import UnsupportedModelError
from mlx_speculation.models import States, find_parts, logit_width
from mlx_speculation.models.checkpoints.joined_head import OwnEnds
from mlx_speculation.models.config_json import text_config
from mlx_speculation.models.eagle import Eagle, EagleHead
from mlx_speculation.models.eagle.config import read_settings
from mlx_speculation.training.kinds.new_head import NewHead, begin_head, layer_sizes
from mlx_speculation.training.unroll import Made, Read, Recorded, attend_split, unroll


class EagleTrainee(NewHead):
    """An EAGLE-3 head in training.

    It can draft the token ids `ids`, and reads `layers` of the target (None:
    `usual_layers`). `config` is the target's. For errors see `check_trainee`.
    """

    kind = "eagle"

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
        taken = usual_layers(len(parts.layers)) if layers is None else layers
        super().__init__(model, ids, taken, after_norm=False)
        self._config = layer_sizes(text_config(config), parts.dim) | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "target_hidden_size": parts.dim,
            "num_hidden_layers": 1,
            "vocab_size": logit_width(model),
            "draft_vocab_size": len(ids),
            "num_aux_hidden_states": len(self.layers),
            "fc_norm": True,
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": list(self.layers),
            },
        }
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
        """Return the outputs of the layers that the head reads."""
        return [states.layer(index) for index in self.layers]

    def run(self, text: Recorded, read: Read[Made]) -> list[Made]:
        """Draft from all slots of a text; see `Trainee.run`."""
        n = self.slots(text.tokens, text.depths)
        hidden = self.module.joined([each[:, :n] for each in text.inputs])
        return unroll(self.eagle, hidden, text, read)


def usual_layers(count: int) -> tuple[int, ...]:
    """Return the layers that SpecForge's heads read: an early, a middle, a late one.

    A head reads all layers if the target has fewer than 6.

    Raises:
        UnsupportedModelError: the target has too few layers.
    """
    if count < 2:
        raise UnsupportedModelError(
            f"The target has {count} layers, and an EAGLE-3 head reads at least 2. "
            "Choose another kind of draft."
        )
    every = range(count) if count < 6 else {1, count // 2 - 1, count - 4}
    return tuple(sorted(every))

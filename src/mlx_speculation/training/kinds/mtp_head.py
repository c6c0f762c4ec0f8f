"""Further training of a target's MTP head.

Most such heads have learned to draft only one token. The trained head gets its own
folder. Its files hold the weights as mlx applies them: norm weights are stored as they
are multiplied, not minus one, and one array holds all experts of a layer.
"""

from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.utils import dequantize_model

from mlx_speculation.errors import UnsupportedModelError
from mlx_speculation.models import HiddenStates, MtpConvention, States, read_config
from mlx_speculation.models.mtp import Mtp, find_mtp_head, load_mtp_head
from mlx_speculation.models.mtp.families import module_of
from mlx_speculation.models.mtp.files import SPLIT
from mlx_speculation.training.kinds.packing import packed, write_draft
from mlx_speculation.training.kinds.trainee import Trainee
from mlx_speculation.training.unroll import Made, Read, Recorded, unroll

# Not trained: experts, their routers, and copies of the target's embedding and output.
_FROZEN = ("output", "embedding", "switch_mlp", "gate")


class MtpTrainee(Trainee):
    """An existing MTP head in training.

    `folder` is the target's. With `convention` None a probe finds the convention.

    Raises:
        UnsupportedModelError: the target's family is unknown, or its head cannot be
            unrolled.
        ModelFolderError: the folder has no head.
    """

    kind = "mtp"

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        folder: Path,
        convention: MtpConvention | None = None,
    ) -> None:
        self.module = head = load_mtp_head(
            folder, model, convention=convention, tokenizer=tokenizer
        )
        caches = [cache for layer in head.new_caches() for cache in layer]
        for cache in caches:
            if not isinstance(cache, KVCache | RotatingKVCache):
                raise UnsupportedModelError(
                    f"The MTP head keeps a {type(cache).__name__}, but only heads with "
                    "KV caches can be trained. Train an EAGLE-3 head instead."
                )
        before = head.convention.hidden == "before_norm"
        self.taps = HiddenStates(model, before_norm=before, after_norm=not before)
        self.most = head.depth
        self._states = attrgetter(head.convention.hidden)
        self._family = find_mtp_head(folder, model).family
        self._trunk, self._module = len(model.layers), module_of(model)
        self._target = read_config(folder)
        unpack(head)
        for path, part in head.named_modules():
            if path.rpartition(".")[2] in _FROZEN:
                part.freeze()
        self._mtp = Mtp(head, self.taps)

    def read(self, states: States) -> list[mx.array]:
        """Return states before or after the target's last norm, by the convention."""
        return [self._states(states)]

    def run(self, text: Recorded, read: Read[Made]) -> list[Made]:
        """Draft from all slots; see `Trainee.run`."""
        hidden = text.inputs[0][:, : self.slots(text.tokens, text.depths)]
        return unroll(self._mtp, hidden, text, read)

    def save(self, folder: Path, bits: int | None) -> None:
        """Write config.json and model.safetensors of a head without its target."""
        tensors, quantization = packed(self.module, bits)
        family = self._family
        if family.split_rules is not None:
            family = replace(family, rules=family.split_rules, after_trunk=False)
        named = {
            family.file_name(name, self._trunk): value
            for name, value in tensors.items()
        }
        config = {
            **{k: v for k, v in self._target.items() if k != "quantization"},
            "model_type": self._module.rpartition(".")[2] + SPLIT,
            **quantization,
        }
        write_draft(folder, named, config)


def unpack(head: nn.Module) -> None:
    """Make the weights of a head float32, and unpack its quantized linear layers.

    Experts stay quantized, since they are not trained.
    """
    for path, part in head.named_modules():
        for name, layer in part.children().items():
            if isinstance(layer, nn.QuantizedLinear) and "switch_mlp" not in path:
                part[name] = dequantize_model(nn.Sequential(layer)).layers[0]
    packed_paths = {path for path, part in head.named_modules() if "scales" in part}

    def single(path: str, value: mx.array) -> mx.array:
        floating = mx.issubdtype(value.dtype, mx.floating)
        unpacked = path.rpartition(".")[0] not in packed_paths
        return value.astype(mx.float32) if floating and unpacked else value

    head.update(tree_map_with_path(single, head.parameters()))
    mx.eval(head.parameters())

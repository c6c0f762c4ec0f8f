"""A small model of the target's family, trained on the target's distributions."""

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import _get_classes

from mlx_speculation.errors import ModelFolderError, UnsupportedModelError
from mlx_speculation.models import (
    States,
    check_positions,
    check_same_ids,
    load,
    logit_width,
    position_table,
    read_config,
)
from mlx_speculation.training.kinds.new_head import draw_matrices
from mlx_speculation.training.kinds.packing import packed, write_draft
from mlx_speculation.training.kinds.trainee import Trainee
from mlx_speculation.training.unroll import Made, Read, Recorded

_TOKENIZER = ("*token*", "vocab*", "merges.txt", "chat_template*", "generation_config*")


class SmallModelTrainee(Trainee):
    """A draft model in training.

    The folder `draft` holds its config.json. If it holds no weights, random ones are
    drawn. `target` is the target's folder, whose tokenizer the draft gets. For errors
    see `check_trainee`.
    """

    kind = "draft"
    first = 1

    def __init__(
        self, model: nn.Module, tokenizer: Any, target: Path, draft: Path, seed: int
    ) -> None:
        self._target, self._config = target, read_config(draft)
        if any(draft.glob("model*.safetensors")):
            self.module, loaded_tokenizer = load(draft)
            check_same_ids(tokenizer, loaded_tokenizer)
        else:
            self.module = _made(self._config, seed)
        self._config.pop("quantization", None)
        self._config.pop("quantization_config", None)
        if any("scales" in part for _, part in self.module.named_modules()):
            raise UnsupportedModelError(
                f"The draft in {str(draft)!r} is quantized, but only weights in 16 or "
                "32 bits can be trained. Take the original; --bits packs the result."
            )
        self.module.set_dtype(mx.float32)
        mx.eval(self.module.parameters())
        widths = logit_width(model), logit_width(self.module)
        self._width = min(widths)
        self._positions = position_table(self.module)
        same = widths[0] == self._width
        self.ids = None if same else mx.arange(self._width, dtype=mx.uint32)

    def read(self, states: States) -> list[mx.array]:
        """Return an empty list: a small model reads tokens only."""
        return []

    def run(self, text: Recorded, read: Read[Made]) -> list[Made]:
        """Draft from all slots, without reading drafted tokens; see `Trainee.run`.

        `text.checkpoint` is ignored.
        """
        tokens, depths = text.tokens, text.depths
        n = self.slots(tokens, depths)
        check_positions(tokens.shape[1] - 1, 0, self._positions)
        logits = self.module(tokens[:, :-1])[..., : self._width]
        return [read(depth, logits[:, depth : depth + n]) for depth in range(depths)]

    def save(self, folder: Path, bits: int | None) -> None:
        """Write a model folder for mlx-lm, with the target's tokenizer."""
        tensors, quantization = packed(self.module, bits)
        write_draft(folder, tensors, self._config | quantization)
        for pattern in _TOKENIZER:
            for file in self._target.glob(pattern):
                shutil.copy(file, folder / file.name)


def _made(config: dict[str, Any], seed: int) -> nn.Module:
    try:
        kind, arguments = _get_classes(config)
        model: nn.Module = kind(arguments.from_dict(config))
    except (ValueError, TypeError, KeyError) as error:
        raise ModelFolderError(
            f"mlx-lm cannot make a model of the draft's config.json: {error}. Check it."
        ) from error
    draw_matrices(model, seed)
    return model

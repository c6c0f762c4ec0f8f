"""A new block drafter for a target, DFlash or DSpark, and its files.

The files have the format of z-lab's DFlash and SpecForge's DSpark. DFlash drafts one
token per mask token. DSpark also drafts one token for the anchor, the known token
that begins a block. DSpark's Markov head adds logits that depend on the token before.

A drafter that drafts only some ids has its own output layer, which is trained. A
drafter of all ids uses the target's output layer. Both use the target's embedding.
"""

from math import exp
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from mlx_speculation.models import States, find_parts, logit_width
from mlx_speculation.models.checkpoints.joined_head import OwnEnds
from mlx_speculation.models.config_json import text_config
from mlx_speculation.models.dflash import DFlash, DFlashHead
from mlx_speculation.models.dflash.config import read_settings as read_dflash
from mlx_speculation.models.dspark import DSparkHead
from mlx_speculation.models.dspark.config import read_settings as read_dspark
from mlx_speculation.training.kinds.new_head import (
    SPREAD,
    NewHead,
    begin_head,
    layer_sizes,
)
from mlx_speculation.training.many_blocks import BlocksCache, run_many_blocks
from mlx_speculation.training.options import BLOCK, BLOCK_LAYERS, RANK, TrainOptions
from mlx_speculation.training.unroll import Made, Read, Recorded, recomputed

_ARCHITECTURES = {"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel"}
_READ = 5  # layers of the target that a drafter reads by default
_AT_ONCE = 128  # blocks of a row in a forward without gradients


class BlockTrainee(NewHead):
    """A block drafter in training.

    `ids` are the token ids that it can draft; None: all. `config` is that of the
    target. `mask` is the id of mask tokens. For errors see `check_trainee`.
    """

    def __init__(
        self,
        options: TrainOptions,
        model: nn.Module,
        config: dict[str, Any],
        ids: NDArray[np.int64] | None,
        mask: int,
    ) -> None:
        parts = find_parts(model)
        parts.require("layers", "norm", "entry")
        trunk, layers = len(parts.layers), options.layers
        taken = usual_layers(trunk) if layers is None else layers
        super().__init__(model, ids, taken, after_norm=True)
        self.kind, width = options.kind, logit_width(model)
        count, block = options.draft_layers or BLOCK_LAYERS, options.block or BLOCK
        extra = {"mask_token_id": mask, "target_layer_ids": list(self.layers)}
        if self.kind == "dspark":
            extra |= {
                "projector_type": "dspark",
                "markov_rank": options.markov_rank or RANK,
                "markov_head_type": "vanilla",
                "sample_from_anchor": True,
            }
        self._config = layer_sizes(text_config(config), parts.dim) | {
            "architectures": [_ARCHITECTURES[self.kind]],
            "model_type": "qwen3",
            "num_hidden_layers": count,
            "layer_types": ["full_attention"] * count,
            "num_target_layers": trunk,
            "block_size": block,
            "vocab_size": width,
            "dflash_config": extra,
        }
        size = None if ids is None else len(ids)
        if size is not None:
            self._config["draft_vocab_size"] = size
        wide, ends = len(self.layers) * parts.dim, OwnEnds(self.ids, size)
        if self.kind == "dflash":
            self.module = DFlashHead(read_dflash(self._config), wide, ends)
        else:
            settings = read_dspark(self._config)
            self.module = DSparkHead(settings, wide, ends, width, size or width)
        run_many_blocks(self.module)
        begin_head(self.module, self.taps, self.ids, options.seed)
        begin_near(self.module)
        self.dflash = DFlash(self.module, self.taps, self.layers)
        self.most = self.module.depth
        # DFlash weights depth d by exp(-d / gamma), where gamma is half a block.
        self.fading = exp(-2 / block)

    def read(self, states: States) -> list[mx.array]:
        """Return the outputs of the layers that the drafter reads."""
        return self.dflash.outputs(states)

    def run(self, text: Recorded, read: Read[Made]) -> list[Made]:
        """Draft from slots; see `Trainee.run`.

        The Markov head reads recorded tokens instead of drafted ones.
        """
        head, tokens, depths = self.module, text.tokens, text.depths
        n, checkpoint, slots = self.slots(tokens, depths), text.checkpoint, text.slots
        context = head.joined([each[:, :n] for each in text.inputs])
        if slots is None:
            slots, parts = mx.broadcast_to(mx.arange(n), (len(tokens), n)), []
            for begin in range(0, n, _AT_ONCE):
                some = slots[:, begin : begin + _AT_ONCE]
                parts.append(self._states(context, tokens, some, depths, False))
                mx.eval(parts[-1])
            states = mx.concatenate(parts, axis=1)
        else:
            states = self._states(context, tokens, slots, depths, checkpoint)
        result = []
        for depth in range(depths):

            def one(states: mx.array, depth: int = depth) -> Made:
                before = mx.take_along_axis(tokens, slots + 1 + depth, axis=1)
                return read(depth, self._logits(states, before))

            made = recomputed(head, one) if checkpoint else one
            result.append(made(states[:, :, depth]))
        return result

    def _states(
        self,
        context: mx.array,
        tokens: mx.array,
        slots: mx.array,
        depths: int,
        checkpoint: bool,
    ) -> mx.array:
        """Return the normed states of drafted tokens, [rows, blocks, depths, dim]."""
        anchors = mx.take_along_axis(tokens, slots + 1, axis=1)
        caches = [BlocksCache(slots, checkpoint=checkpoint) for _ in self.module.layers]
        flat = self.dflash.rows(context, anchors.reshape(-1, 1), caches, depths)
        return flat.reshape(*slots.shape, depths, -1)

    def _logits(self, states: mx.array, before: mx.array) -> mx.array:
        """Return logits [rows, blocks, ids] of states [rows, blocks, dim].

        `before`: the recorded tokens before the drafted ones, [rows, blocks].
        """
        logits: mx.array = self.module.logits(states, self.taps)
        markov = self.module.get("markov_head")
        if markov is None:
            return logits
        # In float32: for frequent ids a sum of gradients in 16 bits stops growing.
        rows = markov.markov_w1.weight.astype(mx.float32)[before]
        added: mx.array = markov.markov_w2(rows.astype(states.dtype))
        return logits + added


def begin_near(head: DFlashHead) -> None:
    """Set initial weights that shorten the training.

    The rows attend to near positions, and read mostly the last tapped layer. With small
    random matrices, they would average the whole context, and learn only slowly to
    attend to the position before the anchor. Here queries use the matrix of the keys,
    so rows attend to similar rows, and most to near ones.
    """
    wide = head.fc.weight
    dim = wide.shape[0]
    identity = mx.eye(dim, wide.shape[1], wide.shape[1] - dim)
    head.fc.weight = identity + wide / 10
    for layer in head.layers:
        attention = layer.self_attn
        for name in ("k_proj", "v_proj", "o_proj"):
            weight = attention[name].weight
            attention[name].weight = weight * (weight.shape[1] ** -0.5 / SPREAD)
        keys = attention.k_proj.weight.reshape(attention.n_kv_heads, 1, -1, dim)
        shared = attention.n_heads // attention.n_kv_heads
        attention.q_proj.weight = mx.repeat(keys, shared, axis=1).reshape(-1, dim)
    mx.eval(head.parameters())


def usual_layers(count: int) -> list[int]:
    """Return the layers that DFlash reads: five, from the second to a late one."""
    if count < _READ + 3:
        return list(range(count))
    return [round(1 + i * (count - 4) / (_READ - 1)) for i in range(_READ)]


def mask_id(tokenizer: Any, width: int) -> int:
    """Return the id of the mask: one that the tokenizer does not use, or a special id.

    `width` is the number of the target's logits.
    """
    unused = 1 + max(tokenizer.get_vocab().values())
    if unused < width:
        return int(unused)
    ends = set(tokenizer.eos_token_ids)
    added = set(getattr(tokenizer, "added_tokens_decoder", {})) - ends
    return int(max((each for each in added if each < width), default=width - 1))

"""Estimate of the memory that a training takes.

It counts the target's weights, four float32 numbers per trained weight (the weight, its
gradient, two moments), and the arrays that the backward pass of a batch needs. It has
not been compared with the peak that mlx reports.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models.quantize import weight_bytes
from mlx_speculation.training.kinds.trainee import Trainee
from mlx_speculation.training.options import BLOCK_LAYERS, TrainOptions

_SHARE = 0.9  # of the available memory may be used
_GB = 1e9


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The sizes that determine the memory of a batch."""

    tokens: int  # of a batch
    slots: int  # of a row
    dim: int  # the hidden size
    heads: int  # of the drafter's attention
    ids: int  # of the drafter's logits
    vocab: int  # of the target's
    depths: int  # tokens drafted from a slot
    item: int  # bytes of a number
    blocks: int | None = None  # in a row; None: not a block drafter
    layers: int = 1  # of a block drafter

    def bytes(self, checkpoint: bool) -> int:
        """Return the bytes that the gradients of a batch need."""
        teacher = self.tokens * (self.vocab + self.ids) * self.item
        if self.blocks is not None:
            return teacher + self._of_blocks(self.blocks, checkpoint)
        # Logits and their gradient, scores and weights of attention, the layer's arrays
        depth = self.tokens * (
            2 * self.ids * self.item
            + self.heads * self.slots * (4 + self.item)
            + 24 * self.dim * self.item
        )
        kept = self.tokens * 6 * self.dim * self.item
        stored = depth + self.depths * kept if checkpoint else self.depths * depth
        return stored + teacher + depth

    def _of_blocks(self, blocks: int, checkpoint: bool) -> int:
        """Return the bytes that the layers and logits of a block drafter need."""
        drafted = self.tokens // self.slots * blocks
        # Logits of the drafter, their gradient, and logits of the teacher
        logits = drafted * 3 * self.ids * self.item
        rows = drafted * (self.depths + 1)
        layer = rows * self.heads * self.slots * 3 * self.item
        layer += (rows + self.tokens) * 24 * self.dim * self.item
        if checkpoint:
            return layer + logits + self.layers * rows * self.dim * self.item
        return (self.layers + 1) * layer + self.depths * logits


def shape_of(
    options: TrainOptions,
    trainee: Trainee,
    config: Mapping[str, Any],
    vocab: int,
    depths: int,
    item: int,
) -> BatchShape:
    """Return the sizes of a batch."""
    dim = int(config.get("hidden_size") or 1024)
    return BatchShape(
        tokens=options.rows * options.slots,
        slots=options.slots,
        dim=dim,
        heads=int(config.get("num_attention_heads") or max(1, dim // 64)),
        ids=vocab if trainee.ids is None else trainee.ids.size,
        vocab=vocab,
        depths=depths,
        item=item,
        blocks=options.drafted_slots,
        layers=options.draft_layers or BLOCK_LAYERS,
    )


@contextmanager
def memory_limit(gb: float | None) -> Iterator[None]:
    """Limit mlx's memory inside the block, and its cache of freed memory to a quarter.

    Args:
        gb: the limit in 10^9 bytes; None: mlx's limits are not changed.
    """
    if gb is None:
        yield
        return
    before = mx.set_memory_limit(int(gb * _GB))
    kept = mx.set_cache_limit(int(gb * _GB / 4))
    try:
        yield
    finally:
        mx.set_memory_limit(before)
        mx.set_cache_limit(kept)


def choose_checkpoint(
    model: nn.Module,
    trained: nn.Module,
    shape: BatchShape,
    wanted: bool,
    limit: float | None = None,
) -> tuple[bool, int]:
    """Return whether to use gradient checkpointing, and the bytes that training needs.

    Args:
        model: the target.
        trained: the drafter.
        shape: the sizes of a batch.
        wanted: whether to use checkpointing even if the memory is enough without.
        limit: the most memory to use, in 10^9 bytes; None: all that is available.

    Raises:
        InvalidRequestError: the memory is not enough.
    """
    fixed = weight_bytes(model) + 4 * trained_bytes(trained)
    result = [available(), None if limit is None else int(limit * _GB)]
    known = min((each for each in result if each is not None), default=None)
    if known is None:
        return wanted, fixed + shape.bytes(wanted)
    most = _SHARE * known
    choices = (True,) if wanted else (False, True)
    needed = 0
    for checkpoint in choices:
        needed = fixed + shape.bytes(checkpoint)
        if needed <= most:
            return checkpoint, needed
    raise InvalidRequestError(
        f"The training needs about {needed / _GB:.1f} GB, and {most / _GB:.1f} GB of "
        "memory can be used here. Take fewer --rows with --accumulate, "
        "shorter --slots, a smaller --draft-vocab, or fewer --depths."
    )


def trained_bytes(module: nn.Module) -> int:
    """Return the bytes of the weights that are trained, as float32."""
    flat: Any = tree_flatten(module.trainable_parameters())
    return sum(4 * value.size for _, value in flat)


def available() -> int | None:
    """Return the bytes of memory of the default device; None: unknown."""
    if mx.default_device() == mx.gpu:
        info = mx.device_info()
        for key in ("max_recommended_working_set_size", "total_memory", "memory_size"):
            if info.get(key):
                return int(info[key])
        return None
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None

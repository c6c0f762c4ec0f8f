"""Estimate of the memory that a training takes.

It counts the target's weights, four float32 numbers per trained weight (the weight, its
gradient, two moments), and the arrays of a backward pass. It has not been compared with
the peak that mlx reports.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_speculation.environment import free_memory
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import logit_width
from mlx_speculation.models.quantize import weight_bytes
from mlx_speculation.training.kinds.trainee import Trainee
from mlx_speculation.training.options import BLOCK_LAYERS, TrainOptions

_SHARE = 0.9  # share of the available memory that may be used
_GB = 1e9


@contextmanager
def memory_limit(gb: float | None) -> Iterator[None]:
    """Limit mlx's memory to `gb` (10^9 bytes), and its cache to a quarter of that.

    None: no change.
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
    options: TrainOptions,
    model: nn.Module,
    trainee: Trainee,
    config: Mapping[str, Any],
    item: int,
) -> tuple[bool, int]:
    """Return whether to use gradient checkpointing, and the bytes that training needs.

    `config`: the target's config.json, or its `text_config`. `item`: bytes per number
    in the drafter's forward.

    Raises:
        InvalidRequestError: the memory is not enough.
    """
    weights: Any = tree_flatten(trainee.module.trainable_parameters())
    fixed = weight_bytes(model) + sum(16 * value.size for _, value in weights)
    limits = [] if options.memory_gb is None else [options.memory_gb * _GB]
    if (free := free_memory()) is not None:
        limits.append(free + mx.get_active_memory())
    most = _SHARE * min(limits, default=float("inf"))
    batch = _batch_bytes(options, logit_width(model), trainee, config, item)
    for checkpoint in (True,) if options.checkpoint else (False, True):
        needed = fixed + batch[checkpoint]
        if needed <= most:
            return checkpoint, needed
    raise InvalidRequestError(
        f"The training needs about {needed / _GB:.1f} GB of memory, but only "
        f"{most / _GB:.1f} GB can be used here. Take fewer --rows and a larger "
        "--accumulate, fewer --slots, a smaller --draft-vocab, or fewer --depths."
    )


def _batch_bytes(
    options: TrainOptions,
    width: int,
    trainee: Trainee,
    config: Mapping[str, Any],
    item: int,
) -> tuple[int, int]:
    """Return the bytes of the arrays of a batch, in the forward and backward pass.

    The first number is without gradient checkpointing, the second with it.
    """
    dim = int(config.get("hidden_size") or 1024)
    heads = int(config.get("num_attention_heads") or max(1, dim // 64))
    ids = width if trainee.ids is None else trainee.ids.size
    depths, slots = trainee.depths(options.unrolled), options.slots
    tokens = options.rows * slots
    teacher = tokens * (width + ids) * item
    if options.drafted_slots is None:
        # Logits and their gradient, scores and weights of attention, the layer's arrays
        depth = tokens * (2 * ids * item + heads * slots * (4 + item) + 24 * dim * item)
        kept = tokens * 6 * dim * item
        return teacher + (depths + 1) * depth, teacher + 2 * depth + depths * kept
    drafted = options.rows * options.drafted_slots
    # Logits of the drafter, their gradient, and logits of the teacher
    logits = drafted * 3 * ids * item
    rows, layers = drafted * (depths + 1), options.draft_layers or BLOCK_LAYERS
    layer = rows * heads * slots * 3 * item + (rows + tokens) * 24 * dim * item
    least = teacher + layer + logits + layers * rows * dim * item
    return teacher + (layers + 1) * layer + depths * logits, least

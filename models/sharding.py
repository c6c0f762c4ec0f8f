"""Targets spread over the ranks of `mx.distributed`, and messages between the ranks.

    tensor      every rank has a part of each layer; ranks sum or gather their results
                inside of a forward, and each rank gets all logits
    pipeline    every rank has some whole layers, and sends its states to the next rank;
                each rank gets the last states and computes all logits

All ranks have to run the same forwards in the same order: if one rank submits a forward
and another does not, both block.
"""

import json
import zlib
from typing import Any, Literal, get_args

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers import distributed as layers
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from mlx_speculation.caches import leaves
from mlx_speculation.errors import InvalidRequestError, UnsupportedModelError

Parallel = Literal["tensor", "pipeline"]
Group = mx.distributed.Group

# The largest size in bytes of a rank's message in `gathered`.
SAID_BYTES = 1024
_TENSOR_LAYERS = (
    layers.AllToShardedLinear,
    layers.ShardedToAllLinear,
    layers.QuantizedAllToShardedLinear,
    layers.QuantizedShardedToAllLinear,
)
# Caches that can keep a prefix without running parts of the model again.
_ROWS = (KVCache, RotatingKVCache)
# Models whose logits are the unchanged product of the output layer.
_BARE_OUTPUT = ("mlx_lm.models.qwen3_5", "mlx_lm.models.qwen3_5_moe")
_SPLIT_OUTPUT = (layers.AllToShardedLinear, layers.QuantizedAllToShardedLinear)


def broadcast(array: mx.array, group: Group) -> mx.array:
    """Return rank 0's array on every rank, not evaluated.

    Every rank passes an array of integers of the same shape and dtype; the values of
    ranks other than 0 are ignored.
    """
    mine = array if group.rank() == 0 else mx.depends(mx.zeros_like(array), array)
    return mx.distributed.all_sum(mine, group=group)


def gathered(said: dict[str, Any], group: Group) -> list[dict[str, Any]]:
    """Return the messages of all ranks, ordered by rank. Waits for all ranks.

    Raises:
        InvalidRequestError: this rank's message is too long.
    """
    line = json.dumps(said).encode()
    if len(line) > SAID_BYTES:
        raise InvalidRequestError(
            f"The message of rank {group.rank()} about itself has {len(line)} bytes; "
            f"at most {SAID_BYTES} fit. Shorten the name of the machine."
        )
    padded = mx.array(list(line.ljust(SAID_BYTES)), mx.uint8)
    everything: Any = mx.distributed.all_gather(padded[None], group=group).tolist()
    return [json.loads(bytes(each)) for each in everything]


def check_parallel(parallel: Any) -> None:
    """Raise `InvalidRequestError` unless `parallel` is one of `Parallel`."""
    if parallel not in get_args(Parallel):
        raise InvalidRequestError(
            f"parallel is {parallel!r}, but has to be one of "
            f"{', '.join(get_args(Parallel))}."
        )


def spread(model: nn.Module, group: Group, parallel: Parallel = "tensor") -> None:
    """Keep this rank's part of a whole model, with mlx-lm's `shard` or `pipeline`.

    The model's weights need not be read yet.

    Raises:
        UnsupportedModelError: the architecture cannot be spread in this way, or over
            this number of ranks.
    """
    check_parallel(parallel)
    name = type(model).__module__
    result: Any = model
    method = None
    if parallel == "tensor":
        method = getattr(result, "shard", None)
    elif hasattr(result, "model"):
        method = getattr(result.model, "pipeline", None)
    if method is None:
        other = "pipeline" if parallel == "tensor" else "tensor"
        raise UnsupportedModelError(
            f"{name} cannot be spread over ranks with parallel={parallel!r}: mlx-lm "
            f"has no such method for it. Try parallel={other!r}, or run it whole on "
            "one rank."
        )
    try:
        method(group)
    except (ValueError, AssertionError) as error:
        raise UnsupportedModelError(
            f"{name} cannot be spread over {group.size()} ranks: {error}. With "
            "parallel='tensor', choose a number of ranks that divides its heads and "
            "widths; with parallel='pipeline', at most its number of layers."
        ) from error


def spread_as(model: nn.Module) -> Parallel | None:
    """Return how a model is spread over ranks; None: it is whole."""
    modules = [module for _, module in model.named_modules()]
    if any(getattr(module, "pipeline_size", 1) > 1 for module in modules):
        return "pipeline"
    groups = [getattr(module, "sharding_group", None) for module in modules]
    groups += [each.group for each in modules if isinstance(each, _TENSOR_LAYERS)]
    return "tensor" if any(each and each.size() > 1 for each in groups) else None


def has_split_output(model: nn.Module) -> bool:
    """Return whether each rank has only a part of the rows of the output layer."""
    return _split_output(model) is not None


def can_join_output(model: nn.Module) -> bool:
    """Return whether the logits are the unchanged result of the output layer."""
    return type(model).__module__ in _BARE_OUTPUT


def joined_output(model: nn.Module, group: Group) -> nn.Module | None:
    """Return a whole copy of a split output layer on rank 0, and None on other ranks.

    All ranks have to call this function.
    """
    split: Any = _split_output(model)
    assert split is not None
    rows = {
        name: mx.distributed.all_gather(array, group=group)
        for name, array in split.parameters().items()
    }
    mx.eval(rows)
    if group.rank() > 0:
        return None
    quantized = isinstance(split, layers.QuantizedAllToShardedLinear)
    made: Any = nn.Linear(1, 1, bias="bias" in rows)  # small, and then filled
    if quantized:
        form = (split.group_size, split.bits, split.mode)
        made = nn.QuantizedLinear(512, 8, "bias" in rows, *form)
    made.update(rows)
    result: nn.Module = made
    return result


def _split_output(model: nn.Module) -> nn.Module | None:
    for name, module in model.named_modules():
        if isinstance(module, _SPLIT_OUTPUT) and "layers." not in name:
            result: nn.Module = module
            return result
    return None


def keeps_rows_alone(model: nn.Module) -> bool:
    """Return whether all caches of this rank hold keys and values, and no states."""
    caches = leaves(make_prompt_cache(model))
    return all(isinstance(leaf, _ROWS) for _, leaf in caches)


def mark_of(model: nn.Module) -> str:
    """Return a checksum of the model's embeddings, which every rank has whole.

    Models with different checksums have different weights. The checksum covers only the
    first and the last row of each embedding outside of the layers.
    """
    mark = zlib.crc32(type(model).__module__.encode())
    for name, module in sorted(model.named_modules(), key=lambda pair: pair[0]):
        if isinstance(module, nn.Embedding | nn.QuantizedEmbedding) and (
            "layers." not in name
        ):
            weight = module.weight
            ends: Any = weight[mx.array([0, weight.shape[0] - 1])]
            shape = f"{name} {weight.shape} {weight.dtype}"
            bits = ends.view(mx.uint8).tolist()
            mark = zlib.crc32(
                bytes(bits[0] + bits[1]), zlib.crc32(shape.encode(), mark)
            )
    return f"{type(model).__module__} {mark:08x}"

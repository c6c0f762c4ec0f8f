"""What has to be the same on all ranks when a stream begins, as plain values.

A difference here would let ranks run other rounds, and wait for each other for ever.
What is rank 0's alone, such as its draft, is not among it.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

import mlx.nn as nn

from mlx_speculation.caches import KVQuantization
from mlx_speculation.engine.draft_length.base import DraftLengthPolicy
from mlx_speculation.engine.prompt import Sequence as Tokens
from mlx_speculation.errors import InvalidRequestError, UnsupportedModelError
from mlx_speculation.models import Parallel, keeps_rows_alone, mark_of, spread_as
from mlx_speculation.samplers import Sampling


def check_spread(model: nn.Module, ranks: int) -> Parallel | None:
    """Return how a target is spread over a group; None: there is one rank.

    Raises:
        InvalidRequestError: it is whole, and there are several ranks; or it is spread,
            and no group was passed.
    """
    how = spread_as(model)
    if ranks > 1 and how is None:
        raise InvalidRequestError(
            f"group has {ranks} ranks, and the model is whole on this one. Load it "
            "with mlx_speculation.load(path, group=group), or call model.shard(group) "
            "first."
        )
    if ranks == 1 and how is not None:
        raise InvalidRequestError(
            f"The model is spread over ranks ({how}), and no group of several ranks "
            "was passed. Pass group=mx.distributed.init()."
        )
    if how == "pipeline" and not keeps_rows_alone(model):
        raise UnsupportedModelError(
            f"{type(model).__module__} has layers whose caches are no rows of keys and "
            "values, such as recurrent states. To keep a part of a draft they may have "
            "to run again, and in a pipeline all ranks with them. Use parallel='tensor'"
            ", or run it whole on one rank."
        )
    return how


def fields_of_model(model: nn.Module, how: Parallel) -> dict[str, Any]:
    """Return what tells one spread target from another."""
    return {"the model": mark_of(model), "parallel": how}


def fields_of_stream(
    tokens: Tokens,
    seen: int,
    sampling: Sampling,
    *,
    max_tokens: int,
    stops: Sequence[str],
    ends: Collection[int],
    draft_length: int | DraftLengthPolicy | None,
    max_draft: int | None,
    acceptance: str,
    constraint: Any,
    prefill_step_size: int,
    kv_quantization: KVQuantization | None,
    yielded_only: bool,
) -> dict[str, Any]:
    """Return the options of a stream that decide what its ranks run."""
    ids = ",".join(map(str, tokens.tokens)).encode()
    digest = hashlib.sha256(ids).hexdigest()[:16]
    named = {
        "the prompt": f"{len(tokens.tokens)} tokens ({digest})",
        "what the caches hold": f"{tokens.start + seen} tokens",
        "max_tokens": max_tokens,
        "stop": list(stops),
        "stop_tokens": sorted(ends),
        "draft_length": shown(draft_length),
        "max_draft": max_draft,
        "acceptance": acceptance,
        "constraint": shown(constraint),
        "prefill_step_size": prefill_step_size,
        "kv_quantization": shown(kv_quantization),
        "yielded_only": yielded_only,
    }
    options = {each.name: getattr(sampling, each.name) for each in fields(Sampling)}
    return named | {name: shown(value) for name, value in options.items()}


def shown(value: Any) -> Any:
    """Return a value as one that JSON has, the same for the same value in each rank."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return shown(sorted(value.items()))
    if isinstance(value, list | tuple | set | frozenset):
        return [shown(each) for each in value]
    if isinstance(value, Callable):  # type: ignore[arg-type]
        return getattr(value, "__qualname__", type(value).__qualname__)
    return type(value).__qualname__

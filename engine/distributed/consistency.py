"""Values that must be equal on all ranks when a stream begins."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.nn as nn

from mlx_speculation.errors import InvalidRequestError, UnsupportedModelError
from mlx_speculation.models import Parallel, keeps_rows_alone, mark_of, spread_as


def check_spread(model: nn.Module, ranks: int) -> Parallel | None:
    """Return how a target is sharded over a group; None: there is one rank.

    Raises:
        InvalidRequestError: the target is not sharded and there are several ranks, or
            it is sharded and there is one rank.
        UnsupportedModelError: a pipeline's caches cannot be cut to a part of a draft.
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
    """Return the values that identify a sharded target."""
    return {"the model": mark_of(model), "parallel": how}


def digest_of(tokens: Sequence[int]) -> str:
    """Return a prompt's length and digest."""
    digest = hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()[:16]
    return f"{len(tokens)} tokens ({digest})"


def shown(value: Any) -> Any:
    """Return a value in JSON types; equal values give equal results on all ranks."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return shown(sorted(value.items()))
    if isinstance(value, list | tuple | set | frozenset):
        return [shown(each) for each in value]
    if isinstance(value, Callable):  # type: ignore[arg-type]
        return getattr(value, "__qualname__", type(value).__qualname__)
    return type(value).__qualname__

"""Drafts that read what their target computes."""

from typing import Any, Protocol, runtime_checkable

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.engine.drafters.base import Drafter
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import Lane


@runtime_checkable
class Following(Protocol):
    """A head on a target, as the draft of a generator.

    Attributes:
        model: the target.
    """

    model: nn.Module

    def check_ids(self, highest: int) -> None:
        """Refuse a head that cannot be fed token ids 0 to `highest`, or drafts others.

        Raises:
            InvalidRequestError: names both numbers.
        """
        ...

    def for_stream(self, target: Lane, sequence: Sequence) -> Drafter:
        """Return the drafter of one stream, which follows the target's lane."""
        ...


def check_embedding(module: Any, name: str, highest: int) -> None:
    """Refuse an embedding that lacks token ids; see `Following.check_ids`.

    Args:
        module: nn.Embedding, as it is or quantized.
        name: whose it is, for the message.
        highest: the largest id that it will be fed.
    """
    rows = module.weight.shape[0]
    if rows <= highest:
        raise InvalidRequestError(
            f"The {name} has {rows} embeddings, and the target's token ids go up to "
            f"{highest}. Choose the head of this target."
        )


def check_drafted(ids: mx.array | None, name: str, highest: int) -> None:
    """Refuse a reduced vocabulary that has ids which the target lacks.

    Args:
        ids: the target's ids of the logits, uint32 [n]; None: all.
        name: whose they are, for the message.
        highest: the target's largest id.
    """
    drafted = 0 if ids is None else int(ids.max())
    if drafted > highest:
        raise InvalidRequestError(
            f"The {name} drafts token ids up to {drafted}, and the target's go up to "
            f"{highest}. Choose the head of this target."
        )

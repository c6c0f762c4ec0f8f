"""Adapters that turn an object passed as `draft=` into a `Draft`.

- A `Draft` is used as it is, except that the members of a cascade are adapted.
- An mlx-lm model becomes a `ModelDraft`.
- An object with the methods of a `Drafter` becomes a `CustomDraft`; each stream wraps
  the object in a `CustomDrafter`.
"""

from collections.abc import Callable
from typing import Any

import mlx.nn as nn

from mlx_speculation.engine.drafters.base import Drafter, OpenDrafter
from mlx_speculation.engine.drafters.draft import Draft
from mlx_speculation.engine.drafters.draft_model import ModelDraft
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import Lane

_METHODS = ("begin", "propose", "settle", "discard")  # of a `Drafter`


class CustomDraft(Draft):
    """The draft of a user's drafter, which drafts for one open stream at a time."""

    reusable = False

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner

    @property
    def trees(self) -> bool:
        """The drafter's attribute `trees`: whether it proposes trees if allowed."""
        return bool(getattr(self.inner, "trees", False))

    @property
    def own_weights(self) -> nn.Module | None:
        """The module in the drafter's attribute `own_weights`; None: no module."""
        result = getattr(self.inner, "own_weights", None)
        return result if isinstance(result, nn.Module) else None

    def open(
        self, lane: Lane, sequence: Sequence, draft_cache: list[Any] | None = None
    ) -> Drafter:
        """Return the drafter itself."""
        return self.inner


class CustomDrafter(OpenDrafter):
    """A user's drafter, with defaults for the attributes that it lacks."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner

    @property
    def name(self) -> str:
        """The name of the user's class."""
        return type(self.inner).__name__


def _of_inner(name: str) -> property:
    """Return a property that reads this attribute of `inner`, or else the default."""

    def member(drafter: CustomDrafter) -> Any:
        default = getattr(super(CustomDrafter, drafter), name)
        return getattr(drafter.inner, name, default)

    return property(member)


for _name in (*_METHODS, "forecast", "held", "read_ahead", "remember"):
    setattr(CustomDrafter, _name, _of_inner(_name))


def adapted(drafter: Drafter) -> OpenDrafter:
    """Return the drafter as an `OpenDrafter`, wrapped if it is a user's."""
    return drafter if isinstance(drafter, OpenDrafter) else CustomDrafter(drafter)


def adapted_draft(draft: Any, resolve: Callable[[Any], Draft]) -> Draft:
    """Return the `Draft` for an object that was passed as a draft.

    Args:
        draft: the object.
        resolve: returns the `Draft` of a member of a cascade.

    Raises:
        InvalidRequestError: the object is no draft.
    """
    name = type(draft).__name__
    if isinstance(draft, type):
        raise InvalidRequestError(
            f"draft is the class {draft.__name__}, and an object is needed. Pass "
            f"{draft.__name__}(...)."
        )
    if isinstance(draft, Draft):
        return draft.resolved(resolve)
    if isinstance(draft, nn.Module):
        return ModelDraft(draft)
    if isinstance(draft, Drafter):
        return CustomDraft(draft)
    missing = [each for each in _METHODS if not hasattr(draft, each)]
    if len(missing) < len(_METHODS):
        raise InvalidRequestError(
            f"draft is of the class {name}, which lacks {', '.join(missing)} of a "
            f"Drafter's methods {', '.join(_METHODS)}. Add what is missing."
        )
    raise InvalidRequestError(
        f"draft is a {name}. Pass an mlx-lm model, a Drafter, an MtpDraft, a path, "
        "'mtp', 'auto', 'lookup' or None."
    )

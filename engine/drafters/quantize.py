"""Cheaper drafts: in fewer bits. The text stays what it is."""

from typing import Any

import mlx.nn as nn

from mlx_speculation.engine.drafters.registry import Kind
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import check_bits


def check_quantized(bits: int, kind: Kind | None, draft: Any) -> None:
    """Refuse bits that there are none of, or a draft that is not loaded here.

    Raises:
        InvalidRequestError: names what was passed.
    """
    check_bits(bits)
    if kind is None and draft != "auto":
        plain = draft is None or isinstance(draft, str)
        found = repr(draft) if plain else f"a {type(draft).__name__}"
        raise InvalidRequestError(
            f"quantize_draft is {bits}, and draft is {found}, which is not loaded "
            "here. Leave it out; mlx.nn.quantize does the same to a model of your own."
        )


def own_module(draft: Any) -> nn.Module | None:
    """Return the module of a loaded draft; None: it has none that is known."""
    if isinstance(draft, nn.Module):
        return draft
    found = getattr(draft, "own_weights", None)
    return found if isinstance(found, nn.Module) else None


def own_weights(draft: Any) -> nn.Module:
    """Return the module of a loaded draft, without what it shares with the target.

    Raises:
        InvalidRequestError: the draft has none that is known.
    """
    module = own_module(draft)
    if module is not None:
        return module
    raise InvalidRequestError(
        f"quantize_draft was passed, and the draft is a {type(draft).__name__}, which "
        "cannot be quantized. Leave it out."
    )

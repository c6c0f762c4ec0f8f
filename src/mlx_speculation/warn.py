"""Warnings of the package."""

import warnings

from mlx_speculation.errors import DraftNotice


def notice(message: str) -> None:
    """Issue a `DraftNotice` that names the line of the caller's caller."""
    warnings.warn(message, DraftNotice, stacklevel=3)

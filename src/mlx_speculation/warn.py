"""Warnings of the package."""

import warnings

from mlx_speculation.errors import DraftNotice


def notice(message: str) -> None:
    """Say something once, where the caller of this package stands."""
    warnings.warn(message, DraftNotice, stacklevel=3)

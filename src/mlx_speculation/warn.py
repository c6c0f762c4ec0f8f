"""Warnings of the package."""

import warnings

from mlx_speculation.errors import DraftNotice


def notice(message: str) -> None:
    """Warn once, with the line of the caller of this package."""
    warnings.warn(message, DraftNotice, stacklevel=3)

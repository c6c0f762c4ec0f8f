"""Copies of the bundled models' folders."""

import shutil
from pathlib import Path

from mlx_speculation import demo_models


def copy_of(name: str, folder: Path) -> Path:
    """Copy a bundled model, without what was found of its head in earlier use."""
    ignored = shutil.ignore_patterns("mtp_convention.json")
    return Path(shutil.copytree(demo_models()[name], folder, ignore=ignored))

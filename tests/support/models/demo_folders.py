"""Copies of the bundled models' folders."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import mlx.nn as nn

from mlx_speculation import demo_models
from mlx_speculation.models import MtpConvention, load
from mlx_speculation.models.mtp import find_mtp_head
from mlx_speculation.models.mtp.load_with_convention import saved_convention


def copy_of(name: str, folder: Path) -> Path:
    return Path(shutil.copytree(demo_models()[name], folder))


def with_length(folder: Path, longest: int) -> Path:
    """Set the context length of a copy."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {"max_position_embeddings": longest}
    file.write_text(json.dumps(config))
    return folder


def probed_hybrid(folder: Path) -> Path:
    """Copy the hybrid model, and save the convention that a probe would find."""
    copy = copy_of("hybrid", folder)
    return probed(copy, load(copy)[0], MtpConvention(norms="stored"))


def probed(folder: Path, model: nn.Module, convention: MtpConvention) -> Path:
    """Save a convention for a folder's head, so that it is not probed."""
    file = saved_convention(find_mtp_head(folder, model))
    file.write({"convention": asdict(convention)})
    return folder

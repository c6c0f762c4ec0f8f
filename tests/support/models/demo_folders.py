"""Copies of the bundled models' folders."""

import shutil
from pathlib import Path

import mlx.nn as nn

from mlx_speculation import demo_models
from mlx_speculation.models import MtpConvention, load
from mlx_speculation.models.mtp.convention_store import Pair, SavedConventions
from mlx_speculation.models.mtp.fingerprints import head_hash, target_hash
from mlx_speculation.models.mtp.load import find_mtp_head


def copy_of(name: str, folder: Path) -> Path:
    """Copy a bundled model, without the saved results of probing its head."""
    ignored = shutil.ignore_patterns("mtp_convention.json")
    return Path(shutil.copytree(demo_models()[name], folder, ignore=ignored))


def probed_hybrid(folder: Path) -> Path:
    """Copy the hybrid model with the result that a probe of its head would have."""
    copy = copy_of("hybrid", folder)
    return probed(copy, load(copy)[0], MtpConvention(norms="stored"))


def probed(folder: Path, model: nn.Module, convention: MtpConvention) -> Path:
    """Save a convention for a folder's head, so that it is not probed."""
    head_files = find_mtp_head(folder, model)
    pair = Pair(target_hash(head_files.folder), head_hash(head_files.files))
    SavedConventions(folder, pair).save(convention, {})
    return folder

"""A family's head on its target, and the inputs that tests give to it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_speculation.models import HiddenStates, MtpConvention
from mlx_speculation.models.mtp import Mtp
from support.models.mtp_checkpoints import read_mtp_head
from support.references.blocks.primitives import Array
from support.references.mtp.base import Family, Ids, MtpRows, rows
from support.references.mtp.folders import MtpFolder, write_mtp_folder

# The number of states: windows see 4 of them, and indexers choose 4.
SLOTS = 11
TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Bench:
    """A family's head in a folder, with random states and tokens as inputs."""

    family: Family  # the reference
    folder: MtpFolder
    hidden: Array  # [SLOTS, H]
    tokens: Ids  # [SLOTS + 3]; token i follows state i

    @property
    def embedding(self) -> Array:
        return self.folder.embedding.astype(np.float64)

    @property
    def head(self) -> Array:
        """The target's output matrix, [V, H]."""
        return self.folder.head.astype(np.float64)

    def load(self, convention: MtpConvention | None = None) -> Mtp:
        model = self.folder.model
        head = read_mtp_head(self.folder.path, model, convention=convention)
        return Mtp(head, HiddenStates(model, after_norm=True))

    def expected(self, hidden: Array, tokens: Ids, layer: int = 0) -> MtpRows:
        return rows(
            self.family,
            self.folder.tensors,
            hidden,
            tokens,
            embedding=self.embedding,
            head=self.head,
            layer=layer,
        )


def make_bench(path: Path, family: Family) -> Bench:
    folder = write_mtp_folder(path, family, 3)
    generator = np.random.default_rng(5)
    return Bench(
        family,
        folder,
        hidden=generator.standard_normal((SLOTS, folder.head.shape[1])),
        tokens=generator.integers(0, len(folder.embedding), SLOTS + 3),
    )


MakeBench = Callable[[str], Bench]


def states(hidden: Array) -> mx.array:
    """Return states [n, H] as [1, n, H]."""
    return mx.array(hidden.astype(np.float32))[None]


def ids(tokens: Ids) -> mx.array:
    """Return tokens [n] as [1, n]."""
    return mx.array(tokens)[None]


def assert_close(ours: mx.array, theirs: Array) -> None:
    """Compare [1, n, d] with [n, d], relative to the largest value."""
    error = np.abs(np.array(ours)[0].astype(np.float64) - theirs).max()
    assert error <= TOLERANCE * np.abs(theirs).max()

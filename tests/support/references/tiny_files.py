"""Random tensors, and folders with a config and one file of tensors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

Float32 = NDArray[np.float32]


class Draws:
    """Random tensors of the scales that weights need, from one seed."""

    def __init__(self, seed: int):
        self._generator = np.random.default_rng(seed)

    def matrix(self, *shape: int) -> Float32:
        """Return a linear weight that keeps the scale of its inputs."""
        return self._normal(shape, 1.5 / np.sqrt(shape[-1]))

    def scale(self, size: int) -> Float32:
        """Return the weight of a norm: around 1."""
        return 1 + self._normal((size,), 0.3)

    def vector(self, *shape: int, size: float = 0.3) -> Float32:
        """Return a bias, or rows of an embedding."""
        return self._normal(shape, size)

    def ordering(self, size: int) -> NDArray[np.int64]:
        return self._generator.permutation(size).astype(np.int64)

    def _normal(self, shape: tuple[int, ...], size: float) -> Float32:
        return (size * self._generator.standard_normal(shape)).astype(np.float32)


def write_folder(
    folder: Path, config: dict[str, Any], tensors: dict[str, NDArray[Any]]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config, indent=2)
    (folder / "config.json").write_text(text, encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def add_biases(folder: Path) -> None:
    """Give `fc` and all projections of a written drafter a random bias."""
    file, draws = folder / "model.safetensors", np.random.default_rng(9)
    tensors = load_file(file)
    for name in [
        each for each in tensors if each.endswith(("fc.weight", "_proj.weight"))
    ]:
        bias = draws.normal(0, 0.3, len(tensors[name])).astype(np.float32)
        tensors[name.removesuffix("weight") + "bias"] = bias
    save_file(tensors, file)

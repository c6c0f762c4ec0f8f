"""Tiny drafters as files, and what a real target gives them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from safetensors.numpy import save_file

from mlx_speculation.models import HiddenStates
from support.identity import prompt_of
from support.models.tiny_models import TINY_MODELS, build_tiny
from support.references.blocks.packagings import is_gguf
from support.references.blocks.primitives import Array
from support.references.tiny_blocks.tiny_tensors import TinyDrafter


@cache
def target_of(layers: int) -> nn.Module:
    """Return a target with the sizes of the tiny drafters."""
    tiny = TINY_MODELS["llama"]
    return build_tiny(replace(tiny, args={**tiny.args, "num_hidden_layers": layers}))


@dataclass(frozen=True, slots=True)
class Known:
    """What a target knows of a text.

    Attributes:
        model: the target.
        tokens: ids, the last of which has no state yet.
        embeddings: [V, H].
        lm_head: [V, H].
    """

    model: nn.Module
    tokens: list[int]
    embeddings: Array
    lm_head: Array

    @classmethod
    def of(cls, layers: int, length: int) -> "Known":
        """Return a text of a target with so many layers."""
        model: Any = target_of(layers)
        table = np.array(model.model.embed_tokens.weight, np.float64)
        tied = "lm_head" not in model
        head = table if tied else np.array(model.lm_head.weight, np.float64)
        return cls(model, prompt_of(length), table, head)

    def states(self, taps: HiddenStates) -> Any:
        """Return what taps show of all positions but the last."""
        with taps.collect() as found:
            self.model(mx.array([self.tokens[:-1]]))
        return found

    def hidden(self, layers: Sequence[int | None]) -> list[Array]:
        """Return the outputs of layers, [positions, H] each.

        -1 is the embedding's, None what the final norm returns.
        """
        named = [layer for layer in layers if layer is not None]
        taps = HiddenStates(self.model, layers=named, after_norm=True)
        try:
            found = self.states(taps)
            arrays = [
                found.after_norm if layer is None else found.layer(layer)
                for layer in layers
            ]
            return [np.array(array[0], np.float64) for array in arrays]
        finally:
            taps.remove()


def write(folder: Path, drafter: TinyDrafter) -> Path:
    """Write a drafter as it is published, and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if is_gguf(drafter.config):
        held: dict[str, Any] = {
            key: value if isinstance(value, str) else mx.array(value)
            for key, value in drafter.config.items()
        }
        tensors = {name: mx.array(value) for name, value in drafter.weights.items()}
        mx.save_gguf(str(folder / "drafter.gguf"), tensors, held)
        return folder
    config = json.dumps(drafter.config)
    (folder / "config.json").write_text(config, encoding="utf-8")
    save_file(drafter.weights, folder / "model.safetensors")
    return folder


def assert_drafts(
    seen: Sequence[tuple[mx.array, mx.array | None]],
    ids: mx.array | None,
    expected: Array,
    tolerance: float = 1e-4,
) -> None:
    """Assert that logits are those of the reference, but for rounding of float32.

    Args:
        seen: logits [1, n] of each draft, and the ids of their columns if they have
            some of their own.
        ids: of the columns elsewhere; None: all, in order.
        expected: [drafts, V], -inf where the drafter cannot reach.
        tolerance: of the largest one.
    """
    assert len(seen) == len(expected)
    for (logits, own), row in zip(seen, expected, strict=True):
        columns = own if own is not None else ids
        found = np.full(len(row), -np.inf)
        places = slice(None) if columns is None else np.array(columns)
        found[places] = np.array(logits[0].astype(mx.float32), np.float64)
        reached = np.isfinite(row)
        np.testing.assert_array_equal(np.isfinite(found), reached)
        scale = max(1.0, float(np.abs(row[reached]).max()))
        assert np.abs(found[reached] - row[reached]).max() <= tolerance * scale

"""The target of drafters that are compared with references, and its states."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_speculation.models import HiddenStates
from support.identity import prompt_of
from support.models.tiny_models import TINY_MODELS, build_tiny
from support.references.blocks.primitives import Array

TOLERANCE = 1e-4


@cache
def target(layers: int = 8) -> nn.Module:
    """Return a target with enough layers that the three usual taps differ."""
    tiny = TINY_MODELS["llama"]
    return build_tiny(replace(tiny, args={**tiny.args, "num_hidden_layers": layers}))


@cache
def tables(layers: int = 8) -> dict[str, Any]:
    model: Any = target(layers)
    embedding = np.array(model.model.embed_tokens.weight, np.float64)
    tied = "lm_head" not in model
    head = embedding if tied else np.array(model.lm_head.weight, np.float64)
    return {"embedding": embedding, "head": head}


@dataclass(frozen=True, slots=True)
class Known:
    """A text that a target has read; its last token has no state yet."""

    model: nn.Module
    tokens: list[int]
    embeddings: Array  # [V, H]
    lm_head: Array  # [V, H]

    @classmethod
    def of(cls, layers: int, length: int) -> "Known":
        weights = tables(layers)
        return cls(
            target(layers), prompt_of(length), weights["embedding"], weights["head"]
        )

    def states(self, taps: HiddenStates) -> Any:
        """Return the states of all positions but the last, as collected by taps."""
        with taps.collect() as states:
            self.model(mx.array([self.tokens[:-1]]))
        return states

    def hidden(self, layers: Sequence[int | None]) -> list[Array]:
        """Return outputs of layers; -1: of the embedding, None: of the final norm."""
        named = [layer for layer in layers if layer is not None]
        taps = HiddenStates(self.model, layers=named, after_norm=True)
        try:
            states = self.states(taps)
            arrays = [
                states.after_norm if layer is None else states.layer(layer)
                for layer in layers
            ]
            return [np.array(array[0], np.float64) for array in arrays]
        finally:
            taps.remove()


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return the content of config.json or of a GGUF file, and the tensors by name."""
    gguf, config_file = folder / "drafter.gguf", folder / "config.json"
    loaded: Any
    if gguf.exists():
        both: Any = mx.load(str(gguf), return_metadata=True)
        loaded, said = both
        config = {k: v if isinstance(v, str) else v.tolist() for k, v in said.items()}
    else:
        loaded = mx.load(str(folder / "model.safetensors"))
        config = json.loads(config_file.read_text(encoding="utf-8"))
    return config, {name: np.array(tensor) for name, tensor in loaded.items()}


def assert_drafts(
    seen: Sequence[tuple[mx.array, mx.array | None]],
    ids: mx.array | None,
    expected: Array,
) -> None:
    """Assert that logits equal the reference's up to rounding of float32.

    `seen` has, for each drafted token, its logits and the ids of their columns; None:
    the ids are `ids`. `expected` is [drafted tokens, V], -inf at ids that the drafter
    cannot draft.
    """
    assert len(seen) == len(expected)
    for (logits, row_ids), row in zip(seen, expected, strict=True):
        columns = row_ids if row_ids is not None else ids
        full = np.full(len(row), -np.inf)
        places = slice(None) if columns is None else np.array(columns)
        full[places] = np.array(logits[0].astype(mx.float32), np.float64)
        reached = np.isfinite(row)
        np.testing.assert_array_equal(np.isfinite(full), reached)
        scale = max(1.0, float(np.abs(row[reached]).max()))
        assert np.abs(full[reached] - row[reached]).max() <= TOLERANCE * scale

"""A Gemma 4 assistant as a module, whose queries attend to a target's keys and values.

A step reads the target's embedding of the newest token, and a state. The first step of
a round takes the target's state after the final norm. Later steps take the state that
the previous step returned. The assistant has no cache. All steps of a round have the
same position in the target's text, and see the keys of committed positions.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma4_text

from mlx_speculation.models.checkpoints.draft_checkpoint import load_into, read_tensors
from mlx_speculation.models.config_json import read_config
from mlx_speculation.models.gemma_assistant.config import (
    NAME,
    AssistantSettings,
    Centroids,
    read_assistant_settings,
)


class Shown(NamedTuple):
    """Keys and values that a layer sees."""

    keys: mx.array  # [batch, heads, rows, dim]
    values: mx.array
    # bool [batch, 1, 1, rows], the rows that each text sees; None: all
    mask: mx.array | None = None


Read = Mapping[str, Shown]  # by kind of layer: sliding or full


class AssistantOutput(NamedTuple):
    """Output of a step."""

    state: mx.array  # for the next step, [batch, 1, target's dim]
    logits: mx.array  # for the next token, [batch, n]
    # The token id of each column, uint32 [batch, n]; None: all ids, in order
    ids: mx.array | None


class TokenGroups(nn.Module):
    """Chooses candidate tokens: those of the groups whose centroids fit best."""

    def __init__(self, settings: Centroids, dim: int, vocab: int) -> None:
        super().__init__()
        self.centroids = nn.Linear(dim, settings.groups, bias=False)
        self.token_ordering = mx.zeros((vocab,), mx.int64)
        self._chosen = settings.chosen

    def candidates(self, hidden: mx.array) -> mx.array:
        """Return distinct token ids, uint32 [batch, n], for states [batch, dim]."""
        scores = self.centroids(hidden)
        best = mx.argpartition(scores, kth=-self._chosen, axis=-1)
        groups = self.token_ordering.reshape(scores.shape[-1], -1)
        chosen = groups[best[:, -self._chosen :]]
        return chosen.reshape(len(hidden), -1).astype(mx.uint32)


class Assistant(nn.Module):
    """A Gemma 4 assistant."""

    def __init__(self, settings: AssistantSettings) -> None:
        super().__init__()
        args = settings.layers
        dim, wide = args.hidden_size, settings.target_dim
        self.pre_projection = nn.Linear(2 * wide, dim, bias=False)
        self.post_projection = nn.Linear(dim, wide, bias=False)
        self.embed_tokens = nn.Embedding(args.vocab_size, dim)
        kinds = args.layer_types or []
        self.layers = [gemma4_text.DecoderLayer(args, i) for i in range(len(kinds))]
        self.norm = nn.RMSNorm(dim, eps=args.rms_norm_eps)
        if settings.centroids is not None:
            self.masked_embedding = TokenGroups(
                settings.centroids, dim, args.vocab_size
            )
        self.settings = settings

    def step(
        self, embedded: mx.array, state: mx.array, read: Read, position: Any
    ) -> AssistantOutput:
        """Run one draft step.

        `embedded` is the newest token's embedding as the target's first layer gets it,
        [batch, 1, target's dim], and `state` has the same shape. `position` is that of
        the queries in the target's text. An array has one position for each text.
        """
        hidden = self.run(embedded, state, read, position)
        logits, ids = self.logits(hidden[:, 0])
        return AssistantOutput(self.post_projection(hidden), logits, ids)

    def run(
        self, embedded: mx.array, state: mx.array, read: Read, position: Any
    ) -> mx.array:
        """Return the hidden state of a step, [batch, 1, dim]; see `step`."""
        x = self.pre_projection(mx.concatenate([embedded, state], axis=-1))
        for layer in self.layers:
            keys, values, mask = read[layer.layer_type]
            x, _, _ = layer(x, mask, shared_kv=(keys, values), offset=position)
        normed: mx.array = self.norm(x)
        return normed

    def logits(self, hidden: mx.array) -> tuple[mx.array, mx.array | None]:
        """Return logits [batch, n] for states [batch, dim] of `run`, and token ids.

        The ids are those of `AssistantOutput.ids`.
        """
        if "masked_embedding" not in self:
            return self.embed_tokens.as_linear(hidden), None
        ids = self.masked_embedding.candidates(hidden)
        rows: Any = self.embed_tokens(ids)
        return (rows @ hidden[..., None])[..., 0], ids


def load_assistant(folder: str | Path) -> Assistant:
    """Load the assistant that a folder holds.

    On a Linux CPU it is float32, dequantized where it was quantized.

    Raises:
        ModelFolderError: the folder holds no assistant, or an incomplete one.
    """
    folder = Path(folder).expanduser()
    assistant = Assistant(read_assistant_settings(read_config(folder)))
    weights = read_tensors(folder, NAME)
    weights.pop("lm_head.weight", None)  # some files hold the embedding twice
    load_into(assistant, weights, NAME)
    return assistant

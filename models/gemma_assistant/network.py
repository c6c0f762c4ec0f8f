"""A Gemma 4 assistant as a module: queries alone, over keys and values of a target.

A step takes the newest token, as the target embeds it, and a state: the target's after
its final norm for the first draft, then the output of the step before. It has no
cache and no position of its own: all steps of a round stand at one place of the
target's text and see the same keys, those of committed positions.

Tensors are named as on disk, without "model." in front.
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

# kind of layer -> keys and values [1, heads, rows, dim]
Read = Mapping[str, tuple[mx.array, mx.array]]


class AssistantOutput(NamedTuple):
    """Output of a step."""

    state: mx.array  # goes into the next step, [1, 1, target's dim]
    logits: mx.array  # for the next token, [1, n]
    ids: mx.array | None  # the tokens of the columns, uint32 [n]; None: all, in order


class TokenGroups(nn.Module):
    """Candidate tokens: those of the groups whose centroids fit best."""

    def __init__(self, settings: Centroids, dim: int, vocab: int) -> None:
        super().__init__()
        self.centroids = nn.Linear(dim, settings.groups, bias=False)
        self.token_ordering = mx.zeros((vocab,), mx.int64)
        self._chosen = settings.chosen

    def candidates(self, hidden: mx.array) -> mx.array:
        """Return token ids, uint32 [n], for a state [1, dim]; they differ."""
        scores = self.centroids(hidden)[0]
        best = mx.argpartition(scores, kth=-self._chosen)[-self._chosen :]
        groups = self.token_ordering.reshape(len(scores), -1)
        return groups[best].reshape(-1).astype(mx.uint32)


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
        self, embedded: mx.array, state: mx.array, read: Read, position: int
    ) -> AssistantOutput:
        """Run one draft step.

        Args:
            embedded: the newest token, as the target's first layer is given it,
                [1, 1, target's dim].
            state: [1, 1, target's dim].
            read: what each kind of layer sees.
            position: where in the target's text the queries stand.
        """
        hidden = self.run(embedded, state, read, position)
        logits, ids = self.logits(hidden[:, 0])
        return AssistantOutput(self.post_projection(hidden), logits, ids)

    def run(
        self, embedded: mx.array, state: mx.array, read: Read, position: int
    ) -> mx.array:
        """Return the hidden state of a step, [batch, 1, dim].

        Takes what `step` takes, of several texts.
        """
        x = self.pre_projection(mx.concatenate([embedded, state], axis=-1))
        for layer in self.layers:
            x, _, _ = layer(x, shared_kv=read[layer.layer_type], offset=position)
        normed: mx.array = self.norm(x)
        return normed

    def logits(self, hidden: mx.array) -> tuple[mx.array, mx.array | None]:
        """Return logits [1, n] of what `run` made, [1, dim], and their tokens."""
        if "masked_embedding" not in self:
            return self.embed_tokens.as_linear(hidden), None
        ids = self.masked_embedding.candidates(hidden)
        rows: Any = self.embed_tokens(ids)
        return hidden @ rows.T, ids


# The output layer is the embedding, which some files hold twice.
_COPIES = ("lm_head.weight",)


def load_assistant(folder: str | Path) -> Assistant:
    """Load the assistant in a folder of its own.

    Returns:
        The assistant; on a Linux CPU in float32, dequantized where it was quantized.

    Raises:
        ModelFolderError: it is none, or not complete.
    """
    folder = Path(folder).expanduser()
    assistant = Assistant(read_assistant_settings(read_config(folder)))
    weights = read_tensors(folder, NAME)
    for copy in _COPIES:
        weights.pop(copy, None)
    load_into(assistant, weights, NAME)
    return assistant

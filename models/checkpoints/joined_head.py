"""What heads share that read the outputs of several of their target's layers.

EAGLE-3 heads and DFlash drafters join these outputs with a layer `fc`. Their decoder
layers are mlx-lm's, and each may have an embedding and an output layer of its own, the
latter perhaps for some token ids only.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models.checkpoints.draft_checkpoint import Weights, take_draft_ids
from mlx_speculation.models.checkpoints.draft_head import Ends


class OwnEnds(NamedTuple):
    """Which ends a head has of its own."""

    # The target's ids of its logits, uint32 [n]; None: all, in their order
    ids: mx.array | None = None
    output: int | None = None  # columns of its output layer; None: the target's is used
    embedding: int | None = None  # rows of its embedding; None: the target's is used


class JoinedHead(nn.Module):
    """The part of a head that is not its decoder layers.

    Args:
        dim: its hidden size.
        eps: of the norm.
        width: numbers that `fc` takes, those of all layers that are read.
        ends: those of its own.
    """

    def __init__(self, dim: int, eps: float, width: int, ends: OwnEnds) -> None:
        super().__init__()
        self.fc = nn.Linear(width, dim, bias=False)
        self.norm = nn.RMSNorm(dim, eps=eps)
        if ends.output is not None:
            self.lm_head = nn.Linear(dim, ends.output, bias=False)
        if ends.embedding is not None:
            self.embed_tokens = nn.Embedding(ends.embedding, dim)
        self._ids = ends.ids

    @property
    def ids(self) -> mx.array | None:
        """The target's ids of its logits, uint32 [n]; None: all, in their order."""
        return self._ids

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of its states; the target's may be another."""
        found: mx.Dtype = self.norm.weight.dtype
        return found

    def embedded(self, tokens: mx.array, target: Any, **options: bool) -> mx.array:
        """Return embeddings [batch, positions, dim], the target's if it has none."""
        if "embed_tokens" in self:
            own: mx.array = self.embed_tokens(tokens)
            return own
        rows: mx.array = target.embed(tokens, **options)
        return rows.astype(self.dtype)

    def logits(self, normed: mx.array, target: Ends) -> mx.array:
        """Return the logits of states after the norm, the target's if it has none."""
        if "lm_head" not in self:
            return target.head(normed)
        own: mx.array = self.lm_head(normed)
        return own


def take_own_ends(
    weights: Weights, name: str, *, dim: int, target_dim: int, vocab: int
) -> OwnEnds:
    """Return the ends that the tensors show; d2t and t2d are taken out of them.

    Args:
        weights: the head's.
        name: of the head, for messages.
        dim: its hidden size.
        target_dim: the target's.
        vocab: how many ids the target has.

    Raises:
        ModelFolderError: they do not fit this target, or one another.
    """
    ids = take_draft_ids(weights, vocab, name)
    found = OwnEnds(ids, _rows(weights, "lm_head"), _rows(weights, "embed_tokens"))
    kinds = {"embedding": found.embedding, "output layer": found.output}
    lacks = [kind for kind, rows in kinds.items() if rows is None]
    if lacks and dim != target_dim:
        raise ModelFolderError(
            f"config.json of the {name} says hidden_size {dim}, and without an "
            f"{lacks[0]} of its own it has to be the target's, {target_dim}. Choose "
            f"the {name} of this target."
        )
    columns = found.output or vocab
    if columns != (vocab if ids is None else ids.size):
        own = "no d2t" if ids is None else f"a d2t of {ids.size}"
        raise ModelFolderError(
            f"The {name} has {columns} columns of logits and {own}, and the target "
            f"{vocab} ids. Take a whole checkpoint of this target's {name}."
        )
    return found


def features_of(weights: Weights, name: str, target_dim: int) -> int | None:
    """Return how many layers `fc` takes; None: it is packed, or missing.

    Raises:
        ModelFolderError: it takes layers of another size than the target's.
    """
    wide = weights.get("fc.weight")
    if wide is None or "fc.scales" in weights:
        return None
    if wide.shape[-1] % target_dim:
        raise ModelFolderError(
            f"fc of the {name} takes {wide.shape[-1]} numbers, and layers of this "
            f"target have {target_dim} each. Choose the {name} of this target."
        )
    return int(wide.shape[-1] // target_dim)


def check_layers(
    layers: Sequence[int],  # counted from 0
    name: str,  # of the head, for messages
    *,
    trunk: int,  # how many layers the target has
    features: int | None = None,  # how many of them `fc` takes; None: not known
    lowest: int = 0,  # -1: the embeddings may be read too
    advice: str = "",  # what may help where the target lacks one, after a comma
) -> tuple[int, ...]:
    """Return layers of the target that a head reads, after checking them.

    Raises:
        ModelFolderError: the target lacks one, or `fc` takes another number of them.
    """
    if min(layers) < lowest or max(layers) >= trunk:
        raise ModelFolderError(
            f"The {name} reads layers {list(layers)} of its target, and this one has "
            f"{trunk}, from 0. Choose the {name} of this target{advice}."
        )
    if features not in (None, len(layers)):
        raise ModelFolderError(
            f"The {name} reads {features} layers of its target, and config.json names "
            f"{len(layers)}: {list(layers)}. Choose the {name} of this target."
        )
    return tuple(layers)


def _rows(weights: Weights, name: str) -> int | None:
    found = weights.get(f"{name}.weight")
    return None if found is None else int(found.shape[0])

"""Base of heads that read the outputs of several of their target's layers.

EAGLE-3 heads and DFlash drafters join these outputs with a layer `fc`. The functions
raise `ModelFolderError` for a head that does not fit its target.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma4_text

from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models.checkpoints.draft_checkpoint import (
    Config,
    Weights,
    take_draft_ids,
)
from mlx_speculation.models.checkpoints.draft_head import Ends
from mlx_speculation.models.config_json import nested

# The bits and group sizes with which mlx packs a matrix.
_BITS, _GROUPS = (2, 3, 4, 5, 6, 8), (16, 32, 64, 128)


class OwnEnds(NamedTuple):
    """Embedding and output layer that a head has of its own."""

    # The target's id for each column of logits, uint32 [n]; None: all ids, in order
    ids: mx.array | None = None
    output: int | None = None  # number of logits; None: the target's layer makes them
    embedding: int | None = None  # number of rows; None: the target's is used


class Loaded(NamedTuple):
    """A head, and the layers of the target whose outputs it reads."""

    head: Any
    layers: tuple[int, ...]
    notice: str = ""  # to the user, about the layers; "": none


class JoinedHead(nn.Module):
    """A head without its decoder layers.

    `width` is the input size of `fc`: the target's hidden size times the number of its
    layers that the head reads. `gemma` has the arguments of Gemma 4's layers; with it
    the head scales its own embeddings and caps its own logits.
    """

    def __init__(
        self,
        dim: int,
        eps: float,
        width: int,
        ends: OwnEnds,
        gemma: gemma4_text.ModelArgs | None = None,
    ) -> None:
        super().__init__()
        self.fc = nn.Linear(width, dim, bias=False)
        self.norm = nn.RMSNorm(dim, eps=eps)
        if ends.output is not None:
            self.lm_head = nn.Linear(dim, ends.output, bias=False)
        if ends.embedding is not None:
            self.embed_tokens = nn.Embedding(ends.embedding, dim)
        self._ids = ends.ids
        self._gemma = gemma

    @property
    def ids(self) -> mx.array | None:
        """The target's id of each logit, uint32 [n]; None: all ids, in order."""
        return self._ids

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of the head's states, which can differ from the target's."""
        result: mx.Dtype = self.norm.weight.dtype
        return result

    def embedded(self, tokens: mx.array, target: Any, **options: bool) -> mx.array:
        """Return embeddings [batch, positions, dim], the head's own or the target's."""
        if "embed_tokens" in self:
            result: mx.array = self.embed_tokens(tokens)
            if self._gemma is None:
                return result
            return result * mx.array(result.shape[-1] ** 0.5, result.dtype)
        rows: mx.array = target.embed(tokens, **options)
        return rows.astype(self.dtype)

    def logits(self, normed: mx.array, target: Ends) -> mx.array:
        """Return logits of normed states, by the head's output layer if it has one."""
        if "lm_head" not in self:
            return target.head(normed)
        result: mx.array = self.lm_head(normed)
        cap = None if self._gemma is None else self._gemma.final_logit_softcapping
        return mx.tanh(result / cap) * cap if cap else result


def take_own_ends(
    weights: Weights, name: str, *, dim: int, target_dim: int, vocab: int
) -> OwnEnds:
    """Return the ends that the weights contain; remove d2t and t2d from the weights."""
    ids = take_draft_ids(weights, vocab, name)
    result = OwnEnds(ids, _rows(weights, "lm_head"), _rows(weights, "embed_tokens"))
    kinds = {"embedding": result.embedding, "output layer": result.output}
    lacks = [kind for kind, rows in kinds.items() if rows is None]
    if lacks and dim != target_dim:
        raise ModelFolderError(
            f"The {name} has no {lacks[0]} of its own, so its hidden_size has to be "
            f"the target's {target_dim}; its config.json has {dim}. Choose the {name} "
            "of this target."
        )
    columns = result.output or vocab
    if columns != (vocab if ids is None else ids.size):
        table = f" and no d2t, but the target has {vocab} ids"
        if ids is not None:
            table = f", but a d2t of {ids.size} ids (the target has {vocab})"
        raise ModelFolderError(
            f"The {name} has {columns} columns of logits{table}. Take a whole "
            f"checkpoint of this target's {name}."
        )
    return result


def features_of(
    weights: Weights, config: Config, name: str, target_dim: int
) -> tuple[int, ...]:
    """Return the possible counts of layers that `fc` reads; empty: there is no `fc`.

    If `fc` is quantized and config.json has no bits, its shapes can fit several counts.
    """
    wide, scales = weights.get("fc.weight"), weights.get("fc.scales")
    if wide is None:
        return ()
    widths = {wide.shape[-1]}
    if scales is not None:
        said = config.get("quantization") or config.get("quantization_config")
        bits = nested({"": said}, "", "fc", "bits") or nested({"": said}, "", "bits")
        packed = {each: wide.shape[-1] * 32 // each for each in _BITS}
        groups = {
            each: width
            for each, width in packed.items()
            if width % scales.shape[-1] == 0 and width // scales.shape[-1] in _GROUPS
        }
        known = isinstance(bits, int) and bits in groups
        widths = {groups[bits]} if known else set(groups.values())
    counts = sorted(width // target_dim for width in widths if not width % target_dim)
    if not counts:
        many = " or ".join(map(str, sorted(widths)))
        wrong = (
            f"fc of the {name} has input size {many}, which is not a multiple of the "
            f"target's hidden size {target_dim}."
        )
        if not many:
            wrong = (
                f"The input size of fc of the {name} cannot be read from its shapes; "
                f"it has to be a multiple of {target_dim}."
            )
        raise ModelFolderError(f"{wrong} Choose the {name} of this target.")
    return tuple(counts)


def check_layers(
    layers: Sequence[int],  # counted from 0
    name: str,
    *,
    trunk: int,  # how many layers the target has
    features: Sequence[int] = (),  # how many layers `fc` can read; empty: unknown
    lowest: int = 0,  # -1: the embeddings are allowed too
    advice: str = "",  # the end of the error for a layer that is missing
) -> tuple[int, ...]:
    """Return the layers that a head reads, after checking that the target has them."""
    if min(layers) < lowest or max(layers) >= trunk:
        raise ModelFolderError(
            f"The {name} reads layers {list(layers)} of the target, but this target's "
            f"layers go from 0 to {trunk - 1}. Choose the {name} of this "
            f"target{advice}."
        )
    if features and len(layers) not in features:
        count = " or ".join(map(str, features))
        raise ModelFolderError(
            f"fc of the {name} takes {count} layers of the target, but config.json "
            f"names {len(layers)}: {list(layers)}. Choose the {name} of this target."
        )
    return tuple(layers)


def _rows(weights: Weights, name: str) -> int | None:
    result = weights.get(f"{name}.weight")
    return None if result is None else int(result.shape[0])

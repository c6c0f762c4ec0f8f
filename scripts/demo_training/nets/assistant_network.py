"""A Gemma 4 assistant in torch: it has queries only, and reads a target's KV.

A draft step pairs a token's embedding in the target with a state: the target's after
its final norm for the first draft, the assistant's own after that. Row i stands for a
round that begins with i + 1 committed positions; all its drafts have position i and
see the target's positions up to i, so every step is causal attention over the same
keys, and only the tokens move.

Parameter names are those of the checkpoints.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo_training.data.vocabulary import VOCABULARY
from demo_training.nets.assistant_shape import SLIDING, AssistantShape
from demo_training.nets.networks import (
    Cache,
    FeedForward,
    Network,
    Norm,
    linear,
    rotate,
)

KeyValues = dict[str, tuple[Tensor, Tensor]]


def read_target(
    target: Network, ids: Tensor, shape: AssistantShape
) -> tuple[Tensor, KeyValues]:
    """The target's states after its final norm, and the keys and values per kind."""
    caches: list[Cache] = [{} for _ in target.layers]
    hidden = target.hidden(ids, caches)
    seen = slice(ids.shape[1])
    found = {}
    for kind in dict.fromkeys(shape.layer_types):
        cache = caches[shape.source(kind)]
        found[kind] = (cache["key"][:, :, seen], cache["value"][:, :, seen])
    return hidden, found


class Queries(nn.Module):
    """Attention over keys and values of the target, with scale one."""

    def __init__(self, shape: AssistantShape, kind: str) -> None:
        super().__init__()
        self.shape, self.kind = shape, kind
        wide = shape.heads * shape.target.head_dim
        self.q_proj = linear(shape.hidden, wide)
        self.o_proj = linear(wide, shape.hidden)
        self.q_norm = Norm(shape.target.head_dim)
        # The target's keys are made for queries of this length.
        nn.init.constant_(self.q_norm.weight, shape.target.head_dim**-0.5)

    def forward(self, x: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Row i sees positions up to i, of a window the last ones."""
        batch, n, _ = x.shape
        query = self.q_proj(x).view(batch, n, self.shape.heads, -1)
        query = rotate(self.q_norm(query).transpose(1, 2), 0, self.shape.target)
        mask = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()
        if self.kind == SLIDING:
            mask = mask.triu(1 - self.shape.target.window)
        out = F.scaled_dot_product_attention(
            query.to(value.dtype),
            key[:, :, :n].to(value.dtype),
            value[:, :, :n],
            attn_mask=mask,
            scale=1.0,
            enable_gqa=True,
        )
        return cast(Tensor, self.o_proj(out.transpose(1, 2).reshape(batch, n, -1)))


class AssistantLayer(nn.Module):
    """A Gemma layer: branches are normed before they are added, then all is scaled."""

    def __init__(self, shape: AssistantShape, kind: str) -> None:
        super().__init__()
        self.self_attn = Queries(shape, kind)
        self.mlp = FeedForward(shape.inner)
        self.input_layernorm = Norm(shape.hidden)
        self.post_attention_layernorm = Norm(shape.hidden)
        self.pre_feedforward_layernorm = Norm(shape.hidden)
        self.post_feedforward_layernorm = Norm(shape.hidden)
        self.layer_scalar = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention, then feed-forward."""
        branch = self.self_attn(self.input_layernorm(x), key, value)
        x = x + self.post_attention_layernorm(branch)
        branch = self.mlp(self.pre_feedforward_layernorm(x))
        x = x + self.post_feedforward_layernorm(branch)
        scaled: Tensor = x * self.layer_scalar
        return scaled


class Trunk(nn.Module):
    """What is under `model.` in the file."""

    def __init__(self, shape: AssistantShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, shape.hidden)
        kinds = shape.layer_types
        self.layers = nn.ModuleList(AssistantLayer(shape, kind) for kind in kinds)
        self.norm = Norm(shape.hidden)


class Assistant(nn.Module):
    """The drafter of a target."""

    def __init__(self, shape: AssistantShape) -> None:
        super().__init__()
        self.shape = shape
        self.pre_projection = linear(2 * shape.target.hidden, shape.hidden)
        self.post_projection = linear(shape.hidden, shape.target.hidden)
        self.model = Trunk(shape)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(
        self, embedded: Tensor, hidden: Tensor, read: KeyValues
    ) -> tuple[Tensor, Tensor]:
        """One draft step of all rows.

        Args:
            embedded: the target's embeddings of the newest tokens, [batch, n, wide].
            hidden: the states before them, [batch, n, wide].
            read: keys and values of the target, for each kind of layer.

        Returns:
            Logits [batch, n, vocab], and the states for the next step.
        """
        x = self.pre_projection(torch.cat([embedded, hidden], -1))
        kinds = self.shape.layer_types
        for kind, layer in zip(kinds, self.model.layers, strict=True):
            x = layer(x, *read[kind])
        y = self.model.norm(x)
        logits = F.linear(y, self.model.embed_tokens.weight)
        return logits, cast(Tensor, self.post_projection(y))

"""An EAGLE-3 head in torch, unrolled as it drafts ("training-time test").

Slot p pairs what the target's layers made of position p with token p + 1. Drafting goes
on from there: at depth d the head is given its own output at slot p, depth d - 1, and
token p + d + 1, at position p + d. It sees what a draft sees: slots 0 to p as the
target's states made them (depth 0), and its own depths 1 to d of this slot.

    keys that slot p sees      depth 0: 0 1 .. p
                               depth 1: 0 1 .. p, and p at depth 1
                               depth 2: 0 1 .. p, and p at depths 1 and 2

Parameter names are the file's (EAGLE-3, arXiv 2503.01840).
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo_training.nets.networks import FeedForward, Norm, linear, rotate
from demo_training.nets.shapes import Shape


class WideAttention(nn.Module):
    """Attention whose queries, keys and values read embedding and state."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = linear(2 * shape.hidden, wide)
        self.k_proj = linear(2 * shape.hidden, narrow)
        self.v_proj = linear(2 * shape.hidden, narrow)
        self.o_proj = linear(wide, shape.hidden)

    def forward(self, x: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Attends to depth 0 up to each slot, and to that slot's other depths.

        Args:
            x: [batch, n, 2 * hidden], one depth further than `past`.
            past: keys and values of the depths before; this one's are added.
        """
        batch, n, _ = x.shape
        depth, groups = len(past), self.shape.heads // self.shape.kv_heads
        query, key, value = (
            made.view(batch, n, -1, self.shape.head_dim).transpose(1, 2)
            for made in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        query = rotate(query, depth, self.shape)
        key = rotate(key, depth, self.shape).repeat_interleave(groups, 1)
        past.append((key, value.repeat_interleave(groups, 1)))
        first_key, first_value = past[0]
        if depth == 0:
            out = F.scaled_dot_product_attention(
                query, first_key, first_value, is_causal=True
            )
        else:
            scale = self.shape.head_dim**-0.5
            future = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
            wide = (query @ first_key.transpose(-1, -2)).float() * scale
            wide = wide.masked_fill(future, float("-inf"))
            own = [(query * k).float().sum(-1) * scale for k, _ in past[1:]]
            total = torch.stack([wide.logsumexp(-1), *own]).logsumexp(0)
            weights = (wide - total[..., None]).exp()
            out = weights.to(value.dtype) @ first_value
            for score, (_, other) in zip(own, past[1:], strict=True):
                weight = (score - total).exp()[..., None]
                out = out + weight.to(value.dtype) * other
        return cast(Tensor, self.o_proj(out.transpose(1, 2).reshape(batch, n, -1)))


class MiddleLayer(nn.Module):
    """The one decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden)
        self.hidden_norm = Norm(shape.hidden)
        self.post_attention_layernorm = Norm(shape.hidden)
        self.self_attn = WideAttention(shape)
        self.mlp = FeedForward(shape)

    def forward(
        self, embedded: Tensor, state: Tensor, past: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Attention on both, then the MLP; the state is what is added to."""
        parts = [self.input_layernorm(embedded), self.hidden_norm(state)]
        x = state + self.self_attn(torch.cat(parts, -1), past)
        return cast(Tensor, x + self.mlp(self.post_attention_layernorm(x)))


class EagleHead(nn.Module):
    """The head: `features` target layers in, `ids` of the draft vocabulary out."""

    def __init__(self, shape: Shape, features: int, ids: int) -> None:
        super().__init__()
        self.shape = shape
        self.fc = linear(features * shape.hidden, shape.hidden)
        self.midlayer = MiddleLayer(shape)
        self.norm = Norm(shape.hidden)
        self.lm_head = linear(shape.hidden, ids)

    def forward(self, embedded: Tensor, features: Tensor, depths: int) -> list[Tensor]:
        """Logits of each depth, [batch, n, ids].

        Args:
            embedded: of all tokens, [batch, n + depths, hidden].
            features: of the first n positions, [batch, n, features * hidden].
            depths: how often the head is run.
        """
        n = features.shape[1]
        state, made = self.fc(features), []
        past: list[tuple[Tensor, Tensor]] = []
        for depth in range(depths):
            paired = embedded[:, depth + 1 : depth + 1 + n].to(state.dtype)
            state = self.midlayer(paired, state, past)
            made.append(self.lm_head(self.norm(state)))
        return made

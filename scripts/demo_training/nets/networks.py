"""The architectures in torch, as far as the demo models need them.

Parameter names and formulas are mlx-lm's, so that exporting is renaming. A norm's
weight is the factor itself here; Gemma's file stores it minus one.
"""

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo_training.data.vocabulary import VOCABULARY
from demo_training.nets.delta import gated_delta
from demo_training.nets.shapes import CONTEXT, EPSILON, Shape

Cache = dict[str, Tensor]
KERNEL = 4


class Norm(nn.Module):
    """RMS norm with a factor per channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last axis in float32."""
        return F.rms_norm(x.float(), x.shape[-1:], self.weight, EPSILON).to(x.dtype)


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A matrix product without bias."""
    return nn.Linear(inputs, outputs, bias=False)


def rotate(x: Tensor, offset: int, shape: Shape) -> Tensor:
    """Rotary positions over the first part of each head, [batch, heads, n, dim]."""
    width = int(shape.head_dim * shape.rotary)
    steps = torch.arange(0, width, 2, device=x.device, dtype=torch.float32)
    positions = torch.arange(x.shape[2], device=x.device, dtype=torch.float32) + offset
    angle = torch.outer(positions, shape.rope_base ** (-steps / width))
    cos, sin = angle.cos(), angle.sin()
    first, second = x[..., : width // 2].float(), x[..., width // 2 : width].float()
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return torch.cat([turned.to(x.dtype), x[..., width:]], -1)


class Attention(nn.Module):
    """Grouped-query attention with normed heads, gated in Qwen 3.5."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.shape = shape
        self.gated = shape.family == "qwen3_5"
        self.window = 0 if shape.is_full(layer) else shape.window
        wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = linear(shape.hidden, wide * (2 if self.gated else 1))
        self.k_proj = linear(shape.hidden, narrow)
        self.v_proj = linear(shape.hidden, narrow)
        self.o_proj = linear(wide, shape.hidden)
        self.q_norm = Norm(shape.head_dim)
        self.k_norm = Norm(shape.head_dim)

    def forward(self, x: Tensor, cache: Cache | None, offset: int) -> Tensor:
        """Attends to the cached positions and the new ones."""
        batch, n, _ = x.shape
        query = self.q_proj(x).view(batch, n, self.shape.heads, -1)
        query, gate = query.chunk(2, -1) if self.gated else (query, None)
        key = self.k_proj(x).view(batch, n, self.shape.kv_heads, -1)
        value = self.v_proj(x).view(batch, n, self.shape.kv_heads, -1).transpose(1, 2)
        query = rotate(self.q_norm(query).transpose(1, 2), offset, self.shape)
        key = rotate(self.k_norm(key).transpose(1, 2), offset, self.shape)
        if cache is not None:
            key, value = self.store(cache, key, value, offset)
        mask = self.mask(n, offset, x.device)
        out = F.scaled_dot_product_attention(
            query.to(value.dtype),
            key.to(value.dtype),
            value,
            attn_mask=mask,
            is_causal=mask is None and n > 1,
            enable_gqa=True,
        )
        out = out.transpose(1, 2).reshape(batch, n, -1)
        if gate is not None:
            out = out * gate.reshape(batch, n, -1).sigmoid()
        return cast(Tensor, self.o_proj(out))

    def store(
        self, cache: Cache, key: Tensor, value: Tensor, offset: int
    ) -> tuple[Tensor, Tensor]:
        """Writes the new positions and returns those that may be seen."""
        batch, heads, n, dim = key.shape
        if not cache:
            for name in ("key", "value"):
                cache[name] = value.new_zeros(batch, heads, CONTEXT // 2, dim)
        cache["key"][:, :, offset : offset + n] = key
        cache["value"][:, :, offset : offset + n] = value
        start = max(0, offset + 1 - self.window) if self.window and n == 1 else 0
        seen = slice(start, offset + n)
        return cache["key"][:, :, seen], cache["value"][:, :, seen]

    def mask(self, n: int, offset: int, device: torch.device) -> Tensor | None:
        """None where causality says it all; only a first block may be longer than 1."""
        if n == 1 or not self.window:
            return None
        ones = torch.ones(n, n, dtype=torch.bool, device=device)
        return ones.tril() & ones.triu(1 - self.window)


class GatedDeltaNet(nn.Module):
    """The recurrent mixer of Qwen 3.5."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width = 2 * shape.key_width + shape.value_width
        self.conv1d = nn.Module()
        self.conv1d.weight = nn.Parameter(torch.randn(width, KERNEL, 1) * 0.3)
        self.in_proj_qkv = linear(shape.hidden, width)
        self.in_proj_z = linear(shape.hidden, shape.value_width)
        self.in_proj_b = linear(shape.hidden, shape.linear_heads)
        self.in_proj_a = linear(shape.hidden, shape.linear_heads)
        self.dt_bias = nn.Parameter(torch.ones(shape.linear_heads))
        self.A_log = nn.Parameter(torch.empty(shape.linear_heads).uniform_(1, 16).log())
        self.norm = Norm(shape.linear_dim)
        self.out_proj = linear(shape.value_width, shape.hidden)

    def forward(self, x: Tensor, cache: Cache | None, offset: int) -> Tensor:
        """Convolution, gated delta rule, gated norm."""
        shape = self.shape
        batch, n, _ = x.shape
        mixed = self.in_proj_qkv(x).transpose(1, 2)
        past = mixed.new_zeros(batch, mixed.shape[1], KERNEL - 1)
        if cache:
            past = cache["past"]
        padded = torch.cat([past, mixed], -1)
        weight = cast(Tensor, self.conv1d.weight).transpose(1, 2).to(padded.dtype)
        mixed = F.silu(F.conv1d(padded, weight, groups=padded.shape[1]))
        mixed = mixed.transpose(1, 2).float()
        sizes = [shape.key_width, shape.key_width, shape.value_width]
        query, key, value = (
            part.view(batch, n, -1, shape.linear_dim).transpose(1, 2)
            for part in mixed.split(sizes, -1)
        )
        query = unit(query) * shape.linear_dim**-0.5
        repeats = shape.linear_heads // shape.linear_key_heads
        query, key = (p.repeat_interleave(repeats, 1) for p in (query, unit(key)))
        step = F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        decay = (-self.A_log.float().exp() * step).transpose(1, 2)
        beta = self.in_proj_b(x).float().sigmoid().transpose(1, 2)
        with torch.autocast(x.device.type, enabled=False):
            state = cache["state"] if cache else None
            out, state = gated_delta(query, key, value, decay, beta, state)
        if cache is not None:
            cache["past"], cache["state"] = padded[..., -(KERNEL - 1) :], state
        gate = self.in_proj_z(x).view(batch, n, -1, shape.linear_dim).float()
        out = self.norm(out.transpose(1, 2)) * F.silu(gate)
        return cast(Tensor, self.out_proj(out.reshape(batch, n, -1).to(x.dtype)))


def unit(x: Tensor) -> Tensor:
    """Scaled to length one; epsilon where mlx-lm has it."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class FeedForward(nn.Module):
    """Gated MLP: SiLU in Qwen, GELU (tanh) in Gemma."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gelu = shape.family == "gemma3_text"
        self.gate_proj = linear(shape.hidden, shape.mlp)
        self.up_proj = linear(shape.hidden, shape.mlp)
        self.down_proj = linear(shape.mlp, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Row by row."""
        gate = self.gate_proj(x)
        gate = F.gelu(gate, approximate="tanh") if self.gelu else F.silu(gate)
        return cast(Tensor, self.down_proj(gate * self.up_proj(x)))


class Layer(nn.Module):
    """One decoder layer; Gemma norms its branches before adding them too."""

    def __init__(self, shape: Shape, layer: int, dropout: float) -> None:
        super().__init__()
        self.sandwich = shape.family == "gemma3_text"
        self.dropout = dropout
        if shape.family == "qwen3_5" and not shape.is_full(layer):
            self.linear_attn = GatedDeltaNet(shape)
        else:
            self.self_attn = Attention(shape, layer)
        self.mlp = FeedForward(shape)
        self.input_layernorm = Norm(shape.hidden)
        self.post_attention_layernorm = Norm(shape.hidden)
        if self.sandwich:
            self.pre_feedforward_layernorm = Norm(shape.hidden)
            self.post_feedforward_layernorm = Norm(shape.hidden)

    def forward(self, x: Tensor, cache: Cache | None = None, offset: int = 0) -> Tensor:
        """Mixer, then feed-forward."""
        mixer = self.linear_attn if hasattr(self, "linear_attn") else self.self_attn
        branch = mixer(self.input_layernorm(x), cache, offset)
        if self.sandwich:
            branch = self.post_attention_layernorm(branch)
        x = x + F.dropout(branch, self.dropout, self.training)
        if self.sandwich:
            branch = self.mlp(self.pre_feedforward_layernorm(x))
            branch = self.post_feedforward_layernorm(branch)
        else:
            branch = self.mlp(self.post_attention_layernorm(x))
        return x + F.dropout(branch, self.dropout, self.training)


class Network(nn.Module):
    """A whole model with tied embeddings."""

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.dropout = dropout
        # mlx-lm rounds Gemma's factor to bfloat16.
        factor = torch.tensor(shape.hidden**0.5).bfloat16().item()
        self.factor = factor if shape.family == "gemma3_text" else 1.0
        self.embed_tokens = nn.Embedding(VOCABULARY, shape.hidden)
        layers = [Layer(shape, index, dropout) for index in range(shape.layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = Norm(shape.hidden)
        self.apply(self.reset)

    def reset(self, module: nn.Module) -> None:
        """Small normal weights; what adds to the residual starts smaller."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        for name in ("o_proj", "down_proj", "out_proj"):
            branch = getattr(module, name, None)
            if isinstance(branch, nn.Linear):
                scale = math.sqrt(2 * self.shape.layers)
                nn.init.normal_(branch.weight, std=0.02 / scale)

    def embed(self, ids: Tensor) -> Tensor:
        """Token vectors, scaled as the family does."""
        x = self.embed_tokens(ids) * self.factor
        return F.dropout(x, self.dropout, self.training)

    def hidden(
        self, ids: Tensor, caches: list[Cache] | None = None, offset: int = 0
    ) -> Tensor:
        """The state after the final norm, [batch, n, hidden]."""
        x = self.embed(ids)
        for index, layer in enumerate(self.layers):
            x = layer(x, None if caches is None else caches[index], offset)
        return cast(Tensor, self.norm(x))

    def logits(self, hidden: Tensor) -> Tensor:
        """The tied output layer, [..., vocab]."""
        return F.linear(hidden, self.embed_tokens.weight)

    def forward(
        self, ids: Tensor, caches: list[Cache] | None = None, offset: int = 0
    ) -> Tensor:
        """Logits for every position."""
        return self.logits(self.hidden(ids, caches, offset))


class PredictionHead(nn.Module):
    """The `mtp.*` layer: pairs the state at i with token i + 1, predicts i + 2."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.fc = linear(2 * shape.hidden, shape.hidden)
        self.pre_fc_norm_embedding = Norm(shape.hidden)
        self.pre_fc_norm_hidden = Norm(shape.hidden)
        self.layers = nn.ModuleList([Layer(shape, shape.interval - 1, 0.0)])
        self.norm = Norm(shape.hidden)

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """The state that predicts, and that is fed back when drafting further."""
        parts = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        return cast(Tensor, self.norm(self.layers[0](self.fc(torch.cat(parts, -1)))))

"""Loss of an EAGLE-3 head on a row of text, in torch, position by position.

From each position the head drafts separately, one token after the other, and computes
its keys again. The library unrolls all positions at once; this code shares nothing with
it.
"""

from typing import Any

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def depth_loss(
    weights: Weights,
    config: dict[str, Any],
    features: list[Tensor],
    embedded: Tensor,
    teacher: Tensor,
    likeliest: list[int],
    counts: list[bool],
    *,
    slots: int,
    depth: int,
    hard: float,
) -> tuple[Tensor, int]:
    """Return the summed loss over the slots, and the number of slots that enter it.

    A slot is a position to draft from. It enters the loss if `counts` is true for the
    token drafted at `depth`, and the head has a column for the target's choice.

    Args:
        features: the outputs of the tapped layers, each [positions, Ht].
        embedded: embeddings of the tokens [positions, H].
        teacher: the target's logits of the head's ids, [positions, ids].
        likeliest: the column of the target's choice after each position; -1: the head
            has no column for it.
        counts: whether the token at a position is part of the loss.
        depth: index of the drafted token, from 0.
        hard: the weight of the loss of the target's choice.
    """
    eps = config["rms_norm_eps"]
    normed = [
        _norm(part, weights[f"fc_norm.{i}.weight"], eps)
        for i, part in enumerate(features)
    ]
    joined = torch.cat(normed, -1) @ weights["fc.weight"].T
    loss, number = torch.zeros((), dtype=joined.dtype), 0
    for slot in range(slots):
        states = list(joined[: slot + 1])
        for _ in range(depth + 1):
            out = _layer(weights, config, states, embedded[1 : len(states) + 1])
            states.append(out)
        after = slot + depth + 1
        if likeliest[after] < 0 or not counts[after + 1]:
            continue
        last = _norm(out, weights["norm.weight"], eps)
        log = (weights["lm_head.weight"] @ last).log_softmax(-1)
        wanted = teacher[after].log_softmax(-1)
        loss = loss + (wanted.exp() * (wanted - log)).sum()
        loss = loss - hard * log[likeliest[after]]
        number += 1
    return loss, number


def _layer(
    weights: Weights, config: dict[str, Any], states: list[Tensor], embedded: Tensor
) -> Tensor:
    """Return the layer's output at the last position."""
    eps, size = config["rms_norm_eps"], config["head_dim"]
    part = {
        name.removeprefix("midlayer."): value
        for name, value in weights.items()
        if name.startswith("midlayer.")
    }
    state = torch.stack(states)
    joined = torch.cat(
        [
            _norm(embedded, part["input_layernorm.weight"], eps),
            _norm(state, part["hidden_norm.weight"], eps),
        ],
        -1,
    )
    query, key, value = (
        (joined @ part[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, size))
        for name in "qkv"
    )
    base = config["rope_theta"]
    query, key = _rotate(query, base)[-1], _rotate(key, base)
    groups = query.shape[0] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = torch.einsum("hd,nhd->hn", query, key) * size**-0.5
    mixed = torch.einsum("hn,nhd->hd", scores.softmax(-1), value).flatten()
    x = state[-1] + part["self_attn.o_proj.weight"] @ mixed
    inner = _norm(x, part["post_attention_layernorm.weight"], eps)
    gate = torch.nn.functional.silu(part["mlp.gate_proj.weight"] @ inner)
    up = part["mlp.up_proj.weight"] @ inner
    return x + part["mlp.down_proj.weight"] @ (gate * up)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def _rotate(x: Tensor, base: float) -> Tensor:
    """Rotate [positions, heads, size] by position; pairs are (i, i + size / 2)."""
    positions, _, size = x.shape
    steps = torch.arange(size // 2, dtype=x.dtype)
    angles = torch.arange(positions, dtype=x.dtype)[:, None] * base ** (
        -2 * steps / size
    )
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    one, two = x.chunk(2, -1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)

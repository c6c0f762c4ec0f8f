"""Mixtures of experts: routers, and experts under their names on disk."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from support.references.numerics import (
    Array,
    Ids,
    Tensors,
    below,
    gated_mlp,
    linear,
    sigmoid,
    silu,
    softmax,
    weight,
)


@dataclass(frozen=True, slots=True)
class Router:
    """Which experts a row goes to, and with which weights.

    Attributes:
        top: experts per row.
        score: what turns the gate's outputs into scores.
        bias: the name of a tensor that is added to choose, not to weigh.
        groups: experts come in so many groups ...
        top_groups: ... of which those with the largest sum of two scores are used.
        normalised: whether the weights of a row sum to the scale.
        scale: what weights are multiplied by.
    """

    top: int
    score: Literal["softmax", "sigmoid"] = "sigmoid"
    bias: str | None = None
    groups: int = 1
    top_groups: int = 1
    normalised: bool = True
    scale: float = 1.0

    def __call__(self, tensors: Tensors, x: Array) -> tuple[Ids, Array]:
        """Return experts [n, top] and their weights [n, top] for x [n, H]."""
        outputs = linear(tensors, "gate", x)
        scores = softmax(outputs) if self.score == "softmax" else sigmoid(outputs)
        ranked = scores
        if self.bias is not None:
            ranked = ranked + weight(tensors, self.bias)
        if self.groups > 1:
            grouped = ranked.reshape(len(x), self.groups, -1)
            totals = np.sort(grouped, axis=-1)[..., -2:].sum(axis=-1)
            best = np.argsort(-totals, axis=-1)[:, : self.top_groups]
            kept = np.zeros(totals.shape, dtype=np.bool_)
            np.put_along_axis(kept, best, True, axis=-1)
            ranked = np.where(kept[..., None], grouped, -np.inf).reshape(len(x), -1)
        experts = np.argsort(-ranked, axis=-1)[:, : self.top]
        weights = np.take_along_axis(scores, experts, axis=-1)
        if self.normalised:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        return experts, weights * self.scale


def routed(tensors: Tensors, router: Router, x: Array) -> Array:
    """Return the weighted sum of each row's gated experts: [n, H]."""
    chosen, weights = router(tensors, x)
    return np.stack(
        [
            sum(
                (
                    w * gated_expert(tensors, e, row)
                    for e, w in zip(es, ws, strict=True)
                ),
                start=np.zeros_like(row),
            )
            for row, es, ws in zip(x, chosen, weights, strict=True)
        ]
    )


def gated_expert(tensors: Tensors, expert: int, row: Array) -> Array:
    """Run one expert, stored by itself or fused with all the others."""
    if "experts.gate_up_proj" in tensors:
        gate, up = np.split(weight(tensors, "experts.gate_up_proj")[expert], 2)
        down = weight(tensors, "experts.down_proj")[expert]
        return np.asarray(down @ (silu(gate @ row) * (up @ row)))
    return gated_mlp(tensors, f"experts.{expert}.", row)


def with_shared(tensors: Tensors, router: Router, x: Array) -> Array:
    """Return routed experts plus shared ones: DeepSeek, GLM, Bailing."""
    return routed(tensors, router, x) + gated_mlp(tensors, "shared_experts.", x)


def with_gated_shared(tensors: Tensors, router: Router, x: Array) -> Array:
    """Return routed experts plus a shared one behind a gate: Qwen."""
    gate = sigmoid(linear(tensors, "shared_expert_gate", x))
    shared = gated_mlp(below(tensors, "shared_expert."), "", x)
    return routed(tensors, router, x) + gate * shared


def squared_relu(tensors: Tensors, router: Router, x: Array) -> Array:
    """Return Nemotron's mixture: no gates, and the rectified values squared.

    The experts may work in a narrower space; the shared expert never does.
    """

    def mlp(prefix: str, y: Array) -> Array:
        wide = np.maximum(linear(tensors, f"{prefix}up_proj", y), 0) ** 2
        return linear(tensors, f"{prefix}down_proj", wide)

    chosen, weights = router(tensors, x)
    narrow = "fc1_latent_proj.weight" in tensors
    inner = linear(tensors, "fc1_latent_proj", x) if narrow else x
    rows = [
        sum(
            (w * mlp(f"experts.{e}.", row) for e, w in zip(es, ws, strict=True)),
            start=np.zeros_like(row),
        )
        for row, es, ws in zip(inner, chosen, weights, strict=True)
    ]
    mixed = np.stack(rows)
    mixed = linear(tensors, "fc2_latent_proj", mixed) if narrow else mixed
    return mixed + mlp("shared_experts.", x)

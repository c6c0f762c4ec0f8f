"""EAGLE-3 layers: fused taps, a layer over [embedding | state], then plain layers."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from support.references.blocks.body import (
    Body,
    body_of,
    inner_config,
    is_gemma,
    is_speculators,
    option,
)
from support.references.blocks.layers import (
    add_attention,
    add_feed_forward,
    attend,
    norm,
)
from support.references.blocks.packagings import canonical_weights
from support.references.blocks.primitives import (
    Array,
    Config,
    Weights,
    attention,
    linear,
    rms,
    softcap,
)
from support.references.blocks.rotary import Rope, rope_of, rope_parameters
from support.references.blocks.vocabulary import target_ids, to_target

_OLD_TAP_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek V2, V3): its sizes and its rotation."""

    rank: int
    nope: int
    rotated: int
    rope: Rope
    scale: float


class EagleHead:
    """A head of the EAGLE-3 family over whole sequences of slots.

    A slot is a token's embedding and a state of the target, with a position.
    `embeddings` and `lm_head` are the target's, for heads without their own. If the
    config lacks `norm_before_residual`, `absent_norm_before_residual` is its value.
    """

    def __init__(
        self,
        weights: Weights,
        config: Config,
        embeddings: Array,
        lm_head: Array,
        *,
        absent_norm_before_residual: bool = False,
    ):
        self.weights = canonical_weights(weights, config)
        self.config = config
        self.body: Body = body_of(self.weights, config)
        self.vocabulary = len(lm_head)
        table = self.weights.get("embed_tokens.weight", embeddings)
        self.head = self.weights.get("lm_head.weight")
        if self.head is None:
            tied = option(config, "tie_word_embeddings", False)
            self.head = table if tied else lm_head
        scale = table.shape[1] ** 0.5 if is_gemma(config) else 1.0
        self._table = table.astype(np.float64) * scale
        said = option(config, "norm_before_residual")
        before = absent_norm_before_residual if said is None else said
        self._norm_before_residual = bool(before)
        self._latent = _latent(config)

    def embed(self, tokens: Array) -> Array:
        """Ids [slots] to embeddings [slots, H]."""
        return np.asarray(self._table[tokens])

    def fuse(self, taps: Array) -> Array:
        """States of the tapped layers [slots, m Ht] to g [slots, H].

        `fc_norm.j` (or the older aux_norm names) norms each tap, `input_norm` all taps
        together. Both come before fc. Without fc, g is the only tap.
        """
        weights, eps = self.weights, self.body.eps
        names = [name for name in _OLD_TAP_NORMS if f"{name}.weight" in weights]
        while f"fc_norm.{len(names)}.weight" in weights:
            names.append(f"fc_norm.{len(names)}")
        if names:
            parts = np.split(taps, len(names), axis=-1)
            taps = np.concatenate(
                [
                    rms(part, weights[f"{name}.weight"], eps)
                    for part, name in zip(parts, names, strict=True)
                ],
                axis=-1,
            )
        if "input_norm.weight" in weights:
            taps = rms(taps, weights["input_norm.weight"], eps)
        return linear(weights, "fc", taps) if "fc.weight" in weights else taps

    def run(self, embedded: Array, fused: Array, positions: Array) -> Array:
        """All layers, causal in slot order: [slots, H] before the last norm.

        With e = embedded and g = fused, both [slots, H], layer 0 computes
        r = g, or rms(g, hidden_norm) if `norm_before_residual`;
        x = r + attention([rms(e, input_layernorm) | rms(g, hidden_norm)]);
        x += mlp(rms(x, post_attention_layernorm)). Later layers are plain, of width H.
        """
        normed = norm(self.weights, "layers.0.hidden_norm", fused, self.body)
        read = norm(self.weights, "layers.0.input_layernorm", embedded, self.body)
        read = np.concatenate([read, normed], axis=-1)
        x = normed if self._norm_before_residual else fused
        for i in range(self.body.layers):
            layer = f"layers.{i}"
            if i:
                name = f"{layer}.input_layernorm"
                if f"{name}.weight" not in self.weights:
                    name = f"{layer}.hidden_norm"  # as SGLang names it
                read = norm(self.weights, name, x, self.body)
            mixed = self.mix(layer, read, positions, self.body.windows[i])
            x = add_attention(self.weights, layer, x, mixed, self.body)
            x = add_feed_forward(self.weights, layer, x, self.body)
        return x

    def states(self, x: Array) -> Array:
        """Return the input of the output matrix: `rms(x, norm)`."""
        return norm(self.weights, "norm", x, self.body)

    def logits(self, states: Array) -> Array:
        """States [.., H] to logits [.., V]: capped, scaled, and scattered by d2t."""
        assert self.head is not None
        cap = option(self.config, "final_logit_softcapping")
        made = softcap(states @ self.head.T, cap)
        made = made * float(option(self.config, "logit_scale", 1.0))
        ids = target_ids(self.weights, made.shape[-1])
        return to_target(made, ids, self.vocabulary)

    def mix(
        self, layer: str, read: Array, positions: Array, window: int | None
    ) -> Array:
        """Causal attention of slots `read` [slots, 2H or H]: [slots, H]."""
        seen = np.tril(np.ones((len(read), len(read)), dtype=bool))
        if window is not None:
            seen &= positions[:, None] - positions[None] < window
        if self._latent is not None:
            return _attend_latent(
                self.weights, layer, read, positions, seen, self.body, self._latent
            )
        return attend(self.weights, layer, read, positions, seen, self.body)


def default_norm_before_residual(config: Config) -> bool:
    """Return vLLM's value when the key is absent: true for speculators' eagle3 only."""
    kind = config.get("speculators_model_type")
    return is_speculators(config) and kind == "eagle3"


def _latent(config: Config) -> Latent | None:
    inner = inner_config(config)
    if not inner.get("kv_lora_rank"):
        return None
    nope, rotated = int(inner["qk_nope_head_dim"]), int(inner["qk_rope_head_dim"])
    rope = rope_of(
        inner,
        rotated,
        partial=False,
        interleaved=bool(inner.get("rope_interleave", True)),
    )
    scale = (nope + rotated) ** -0.5
    parameters = rope_parameters(inner)
    stretched = parameters.get("mscale_all_dim")
    if stretched:
        factor = math.log(float(parameters["factor"]))
        scale *= (0.1 * float(stretched) * factor + 1) ** 2
    return Latent(int(inner["kv_lora_rank"]), nope, rotated, rope, scale)


def _attend_latent(
    weights: Weights,
    layer: str,
    read: Array,
    positions: Array,
    seen: NDArray[np.bool_],
    body: Body,
    latent: Latent,
) -> Array:
    """MLA: q = Wqb rms(Wqa x) (or Wq x); [c | k_rope] = Wkva x; [k | v] = Wkvb rms(c).

    The rotated part of the keys is the same for all heads.
    """
    name = f"{layer}.self_attn"
    rows = len(read)
    query_rows = read
    if f"{name}.q_a_proj.weight" in weights:
        down = linear(weights, f"{name}.q_a_proj", read)
        query_rows = norm(weights, f"{name}.q_a_layernorm", down, body)
    up = "q_b_proj" if f"{name}.q_b_proj.weight" in weights else "q_proj"
    made = linear(weights, f"{name}.{up}", query_rows).reshape(rows, body.heads, -1)
    turned = latent.rope(made[..., latent.nope :], positions)
    queries = np.concatenate([made[..., : latent.nope], turned], axis=-1)

    joined = linear(weights, f"{name}.kv_a_proj_with_mqa", read)
    compressed = joined[:, : latent.rank]
    compressed = norm(weights, f"{name}.kv_a_layernorm", compressed, body)
    shared = latent.rope(joined[:, None, latent.rank :], positions)
    both = linear(weights, f"{name}.kv_b_proj", compressed)
    both = both.reshape(rows, body.heads, -1)
    shared = np.broadcast_to(shared, (rows, body.heads, latent.rotated))
    keys = np.concatenate([both[..., : latent.nope], shared], axis=-1)
    values = both[..., latent.nope :]
    mixed = attention(queries, keys, values, seen, latent.scale)
    return linear(weights, f"{name}.o_proj", mixed.reshape(rows, -1))

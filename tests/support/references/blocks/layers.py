"""Decoder layers: attention and MLP by tensor names, and the body of block drafters."""

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from support.references.blocks.body import Body
from support.references.blocks.primitives import (
    Array,
    Weights,
    attention,
    gelu_tanh,
    linear,
    rms,
    sigmoid,
    silu,
)

Around = Callable[[str, Array, Callable[[Array], Array]], Array]


def norm(weights: Weights, name: str, x: Array, body: Body) -> Array:
    return rms(x, weights[f"{name}.weight"], body.eps, body.norm_offset)


def _head_norm(weights: Weights, name: str, x: Array, body: Body) -> Array:
    """Norm of queries or keys [rows, heads, hd], if the file has one.

    A weight of hd numbers norms each head alone; one of heads * hd, all together.
    """
    weight = weights.get(f"{name}.weight")
    if weight is None:
        return x
    if weight.size == x.shape[-1]:
        return rms(x, weight, body.eps, body.norm_offset)
    wide = rms(x.reshape(len(x), -1), weight, body.eps, body.norm_offset)
    return wide.reshape(x.shape)


def queries(
    weights: Weights, layer: str, x: Array, positions: Array, body: Body
) -> tuple[Array, Array | None]:
    """Rotated queries [rows, nh, hd], and their gates [rows, nh, hd], if any."""
    made = linear(weights, f"{layer}.self_attn.q_proj", x)
    made = made.reshape(len(x), body.heads, -1)
    gate = None
    if body.gated_query:
        made, gate = made[..., : body.head_dim], made[..., body.head_dim :]
    made = _head_norm(weights, f"{layer}.self_attn.q_norm", made, body)
    return body.rope(made, positions), gate


def keys_values(
    weights: Weights, layer: str, x: Array, positions: Array, body: Body
) -> tuple[Array, Array]:
    """Rotated keys and values [rows, nkv, hd].

    Gemma 4 normalizes values, without a weight. When the file has no v_proj, the values
    are the output of k_proj before the norm and the rotation of keys.
    """
    shape = len(x), body.kv_heads, -1
    keys = linear(weights, f"{layer}.self_attn.k_proj", x).reshape(shape)
    values = keys
    if f"{layer}.self_attn.v_proj.weight" in weights:
        values = linear(weights, f"{layer}.self_attn.v_proj", x).reshape(shape)
    if body.gemma:
        values = rms(values, None, body.eps)
    keys = _head_norm(weights, f"{layer}.self_attn.k_norm", keys, body)
    return body.rope(keys, positions), values * body.value_scale


def attend(
    weights: Weights,
    layer: str,
    x: Array,
    positions: Array,
    seen: NDArray[np.bool_],
    body: Body,
    context: tuple[Array, Array] | None = None,
) -> Array:
    """Attention of rows x [rows, width] to context rows and to each other.

    `context` has rows [context, H] that give keys and values only, and their positions.
    `seen` is [rows, context + rows].
    """
    queried, gate = queries(weights, layer, x, positions, body)
    keys, values = keys_values(weights, layer, x, positions, body)
    if context is not None:
        before = keys_values(weights, layer, *context, body)
        keys = np.concatenate([before[0], keys])
        values = np.concatenate([before[1], values])
    sinks = weights.get(f"{layer}.self_attn.attention_sink_bias")
    mixed = attention(queried, keys, values, seen, body.scale, sinks)
    if gate is not None:
        mixed = mixed * sigmoid(gate)
    return linear(weights, f"{layer}.self_attn.o_proj", mixed.reshape(len(x), -1))


def feed_forward(weights: Weights, layer: str, x: Array, body: Body) -> Array:
    """`down(act(gate x) * up x)`, act = SiLU, or tanh-GELU for Gemma 4."""
    act = gelu_tanh if body.gemma else silu
    gate = linear(weights, f"{layer}.mlp.gate_proj", x)
    up = linear(weights, f"{layer}.mlp.up_proj", x)
    return linear(weights, f"{layer}.mlp.down_proj", act(gate) * up)


def unchanged(name: str, rows: Array, inner: Callable[[Array], Array]) -> Array:
    """Run attention or the MLP alone; DFlash2 has convolutions around them."""
    return inner(rows)


def add_attention(
    weights: Weights, layer: str, residual: Array, mixed: Array, body: Body
) -> Array:
    """`residual + mixed`; Gemma 4 first norms `mixed`, the output of attention."""
    if body.gemma:
        mixed = norm(weights, f"{layer}.post_attention_layernorm", mixed, body)
    return residual + mixed


def add_feed_forward(
    weights: Weights, layer: str, x: Array, body: Body, around: Around = unchanged
) -> Array:
    """The MLP half of a layer; Gemma 4 has a norm after the MLP, and `layer_scalar`."""
    before = "pre_feedforward" if body.gemma else "post_attention"
    rows = norm(weights, f"{layer}.{before}_layernorm", x, body)
    inner = partial(feed_forward, weights, layer, body=body)
    made = around(f"{layer}.mlp_conv", rows, inner)
    if not body.gemma:
        return x + made
    made = norm(weights, f"{layer}.post_feedforward_layernorm", made, body)
    scalar = weights.get(f"{layer}.layer_scalar")
    return (x + made) * (1.0 if scalar is None else scalar)


def seen_by_block(
    positions: Array, rows: int, window: int | None, causal: bool
) -> NDArray[np.bool_]:
    """Return the keys that each row of a block sees: [rows, context + rows].

    Row j is at position start + j. With a window it sees context position p iff
    start + j - p < window. In a causal block it sees rows up to j within the window.
    """
    start = int(positions[-1]) + 1
    block_positions = start + np.arange(rows)[:, None]
    context = np.ones((rows, len(positions)), dtype=bool)
    if window is not None:
        context = block_positions - positions[None] < window
    block = np.ones((rows, rows), dtype=bool)
    if causal:
        block = np.tril(block) & ~np.tril(block, -(window or rows))
    return np.concatenate([context, block], axis=1)


def run_block(
    weights: Weights,
    body: Body,
    context: Array,
    block: Array,
    positions: Array,
    causal: tuple[bool, ...],
    around: Around = unchanged,
) -> Array:
    """Run all layers over a block, without the last norm; return [rows, H].

    In each layer, a = rms(x, input_layernorm) gives queries, keys and values of the
    block. The same context rows give keys and values in every layer, without that norm.
    Then x += Wo attention; x += mlp(rms(x, post_attention_layernorm)).

    Args:
        context: [n, H], `rms(fc(taps), hidden_norm)`.
        block: [rows, H], embeddings of the anchor and the mask tokens.
        positions: [n], ascending; the block follows the last position.
        around: Called with a name, the normed rows and attention or the MLP.
    """
    block_positions = int(positions[-1]) + 1 + np.arange(len(block))
    x = block
    for i in range(body.layers):
        layer = f"layers.{i}"
        seen = seen_by_block(positions, len(block), body.windows[i], causal[i])
        mix = partial(
            attend,
            weights,
            layer,
            positions=block_positions,
            seen=seen,
            body=body,
            context=(context, positions),
        )
        rows = norm(weights, f"{layer}.input_layernorm", x, body)
        mixed = around(f"{layer}.attention_conv", rows, mix)
        x = add_attention(weights, layer, x, mixed, body)
        x = add_feed_forward(weights, layer, x, body, around)
    return x

"""DFlash2: a block drafter with convolutions in its layers, and a selector after them.

Backbone and context rows are those of DSpark. Row 0, the anchor, drafts nothing.
"""

from collections.abc import Callable, Sequence

import numpy as np

from support.references.blocks.body import body_of, causal_layers, option
from support.references.blocks.layers import norm, run_block
from support.references.blocks.packagings import canonical_weights
from support.references.blocks.primitives import (
    Array,
    Config,
    Weights,
    linear,
    softcap,
)
from support.references.blocks.vocabulary import predecessor_choice, to_target


def convolve(
    weights: Weights, config: Config, name: str, rows: Array, side: int, read: Array
) -> Array:
    """The grouped dynamic causal convolution over the rows of one block.

        out[i, c] = sum over t <= i, t < taps of
            (base[side, t, c] + delta[i, side, t, c // g]) y[i - t, c],
        delta = kernel_projection(read) as [rows, 2, taps, H / g]

    `rows` are y [rows, H]. `side` is 0 before attention or MLP, and 1 after it. `read`
    are the normed rows before attention or MLP, for both sides.
    """
    base = weights[f"{name}.base_kernel"][side]  # [taps, H]
    taps, width = base.shape
    group = int(option(config, "conv_group_size", 16))
    delta = linear(weights, f"{name}.kernel_projection", read)
    delta = delta.reshape(len(read), 2, taps, width // group)[:, side]
    kernel = base + np.repeat(delta, group, axis=-1)  # [rows, taps, H]
    out = np.zeros_like(rows)
    for i in range(len(rows)):
        for t in range(min(taps, i + 1)):
            out[i] += kernel[i, t] * rows[i - t]
    return out


def forward(
    weights: Weights,
    config: Config,
    hidden: Sequence[Array],
    embeddings: Array,
    lm_head: Array,
    tokens: Sequence[int],
    *,
    chosen: Sequence[int] | None = None,
) -> Array:
    """Return the logits of one block's drafts, [k, V]; -inf for all but the candidates.

        u_s = cap(output_multiplier lm_head h_s), C_s its top K ids; for c in C_s:
        z_s[c] = u_s[c] + sum_r A[p]_r (P h_s)_r B[c]_r, p = the id drafted before

    The arguments are those of `dspark.forward`. This function scales `embeddings`, and
    cuts off rows of `lm_head` past `vocab_size`.
    """
    tensors = canonical_weights(weights, config)
    cap = option(config, "final_logit_softcapping")
    multiplier = float(option(config, "output_multiplier", 1.0))
    states = slot_states(
        tensors,
        config,
        hidden,
        embeddings,
        int(tokens[-1]),
    )
    unary, ids = _candidates(states, lm_head, config, multiplier, cap)
    logits = []
    previous = int(tokens[-1])
    for s, state in enumerate(states):
        scores = unary[s] + _edges(tensors, state, np.array([previous]), ids[s])[0]
        full = to_target(scores, ids[s], len(lm_head))
        previous = predecessor_choice(full, chosen, s)
        logits.append(full)
    return np.stack(logits)


def slot_states(
    tensors: Weights,
    config: Config,
    hidden: Sequence[Array],
    table: Array,
    anchor: int,
) -> Array:
    """The normed rows of the mask tokens: [S, H]."""
    body = body_of(tensors, config)
    slots = int(option(config, "block_size")) - 1
    mask = int(option(config, "mask_token_id"))
    scale = float(option(config, "input_embedding_scale", 1.0))
    block = table[[anchor] + [mask] * slots].astype(np.float64) * scale

    def around(name: str, rows: Array, inner: Callable[[Array], Array]) -> Array:
        made = inner(convolve(tensors, config, name, rows, 0, rows))
        return convolve(tensors, config, name, made, 1, rows)

    context = linear(tensors, "fc", np.concatenate(hidden, axis=-1))
    context = norm(tensors, "hidden_norm", context, body)
    causal = causal_layers(config, body, non_causal_default=True)
    positions = np.arange(len(context))
    x = run_block(tensors, body, context, block, positions, causal, around)
    return norm(tensors, "norm", x, body)[1:]


def _candidates(
    states: Array,
    lm_head: Array,
    config: Config,
    multiplier: float,
    cap: float | None,
) -> tuple[Array, Array]:
    """Scores [S, K] and ids [S, K] of the best K ids of every slot, best first."""
    size = min(int(option(config, "vocab_size", len(lm_head))), len(lm_head))
    scores = softcap(states @ lm_head[:size].T * multiplier, cap)
    best = min(int(option(config, "selector_top_k", 16)), size)
    ids = np.argsort(-scores, axis=-1, kind="stable")[:, :best]
    return np.take_along_axis(scores, ids, axis=-1), ids


def _edges(weights: Weights, state: Array, before: Array, here: Array) -> Array:
    """edge(p, c) = sum_r A[p]_r (P h)_r B[c]_r for p in before, c in here."""
    name = "candidate_selector"
    middle = linear(weights, f"{name}.hidden_projection", state)
    left = weights[f"{name}.predecessor_codebook"][before]
    right = weights[f"{name}.successor_codebook"][here]
    return np.asarray((left * middle) @ right.T)

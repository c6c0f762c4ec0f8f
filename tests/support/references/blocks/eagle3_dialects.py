"""EAGLE-3 and 3.1 in their published dialects, which recycle one state per step."""

from collections.abc import Sequence

import numpy as np

from support.references.blocks.body import option
from support.references.blocks.eagle_layers import (
    EagleHead,
    default_norm_before_residual,
)
from support.references.blocks.primitives import Array, Config, Weights
from support.references.blocks.vocabulary import predecessor_choice


def forward(
    weights: Weights,
    config: Config,
    hidden: Sequence[Array],
    embeddings: Array,
    lm_head: Array,
    tokens: Sequence[int],
    *,
    drafts: int,
    chosen: Sequence[int] | None = None,
) -> Array:
    """Return the logits of `drafts` tokens, one after the other, [k, V].

    Slot i pairs the state at position i with the token at i + 1. Slot n-1 gives d_1.
    For j from 2, slot n-2+j pairs the output of slot n-3+j (before `norm`, or after it
    if `norm_output`) with d_{j-1} and gives d_j.

    Args:
        hidden: The outputs [n, Ht] of the tapped layers (`eagle_taps`). If
            `use_aux_hidden_state` is false, the last hidden state alone.
        embeddings, lm_head: [V, H] of the target, for heads without their own.
        tokens: The n + 1 committed ids c_0..c_n.
        chosen: See `dspark.forward`.
    """
    head = EagleHead(
        weights,
        config,
        embeddings,
        lm_head,
        absent_norm_before_residual=default_norm_before_residual(config),
    )
    known = len(hidden[0])
    places = np.arange(known)
    fused = head.fuse(np.concatenate(hidden, axis=-1))
    embedded = head.embed(np.asarray(tokens[1:]))
    logits = []
    for step in range(drafts):
        x = head.run(embedded, fused, places)[-1]
        state = head.states(x)
        row = head.logits(state)
        token = predecessor_choice(row, chosen, step)
        logits.append(row)
        recycled = state if option(config, "norm_output", False) else x
        fused = np.concatenate([fused, recycled[None]])
        embedded = np.concatenate([embedded, head.embed(np.array([token]))])
        places = np.append(places, places[-1] + 1)
    return np.stack(logits)

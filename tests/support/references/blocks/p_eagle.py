"""P-EAGLE (arXiv 2602.01469): EAGLE-3 with masked slots, all drafts in one forward."""

from collections.abc import Sequence

import numpy as np

from support.references.blocks.body import option
from support.references.blocks.eagle_layers import EagleHead
from support.references.blocks.primitives import Array, Config, Weights

_MASK_KEYS = (
    "mask_token_id",
    "dspark_noise_token_id",
    "pard_token",
    "ptd_token_id",
)


def mask_token(config: Config) -> int:
    """The id of masked slots, from the keys that vLLM reads, in its order."""
    inside = (config.get("dflash_config") or {}).get("mask_token_id")
    for token in (inside, *(option(config, name) for name in _MASK_KEYS)):
        if token is not None:
            return int(token)
    raise ValueError(f"the config names no mask token; it needs one of {_MASK_KEYS}")


def forward(
    weights: Weights,
    config: Config,
    hidden: Sequence[Array],
    embeddings: Array,
    lm_head: Array,
    tokens: Sequence[int],
    *,
    drafts: int,
) -> Array:
    """Return the logits of `drafts` tokens, [k, V]; no draft depends on another.

    Slots 0..n-1 pair (h_i, c_{i+1}) as in EAGLE-3. Then drafts - 1 masked slots have
    the embedding of the mask id and fc(mask_hidden), through the same norms as real
    taps. Slot n-1 gives d_1, masked slot n-1+j gives d_{1+j}. The arguments are those
    of `eagle3_dialects.forward`.
    """
    head = EagleHead(weights, config, embeddings, lm_head)
    known = len(hidden[0])
    taps = np.concatenate(hidden, axis=-1)
    mask_hidden = head.weights["mask_hidden"].reshape(-1)
    masked = drafts - 1
    taps = np.concatenate([taps, np.tile(mask_hidden, (masked, 1))])
    ids = np.array([*tokens[1:], *[mask_token(config)] * masked])
    places = np.arange(known + masked)
    x = head.run(head.embed(ids), head.fuse(taps), places)[-drafts:]
    return head.logits(head.states(x))

"""DSpark (arXiv 2607.05147): a block in one forward, then a Markov head over it."""

from collections.abc import Sequence

import numpy as np

from support.references.blocks.body import (
    body_of,
    causal_layers,
    is_gemma,
    option,
)
from support.references.blocks.layers import norm, run_block
from support.references.blocks.packagings import (
    canonical_config,
    canonical_weights,
)
from support.references.blocks.primitives import (
    Array,
    Config,
    Weights,
    linear,
    sigmoid,
    silu,
    softcap,
)
from support.references.blocks.vocabulary import (
    predecessor_choice,
    target_ids,
    to_target,
)


def forward(
    weights: Weights,
    config: Config,
    hidden: Sequence[Array],
    embeddings: Array,
    lm_head: Array,
    tokens: Sequence[int],
    *,
    chosen: Sequence[int] | None = None,
    samples: bool | None = None,
) -> Array:
    """Return the logits of one block's drafts, [k, V]; -inf outside the drafter's ids.

        ctx = rms(fc [h_1 | .. | h_m], hidden_norm); g: the normed rows of the block
        U_k = cap(lm_head g_k), z_k = U_k + bias(d_{k-1}, g_k), d_0 = anchor

    If there is no Markov head, and row 0 drafts nothing, this is a block of DFlash.

    Args:
        weights, config: A file in any packaging, under its published names.
        hidden: The outputs [n, Ht] of the tapped layers, without a row of the anchor.
        embeddings, lm_head: [V, H] of the target, for drafters without their own.
        tokens: Committed ids; only the last one, the anchor, is read.
        chosen: Ids of the first drafted positions; later ones take the most likely id.
        samples: Whether row 0 drafts; None: `anchor_samples`.
    """
    tensors = canonical_weights(weights, config)
    plain = canonical_config(config)
    body = body_of(tensors, plain)
    samples = anchor_samples(plain) if samples is None else samples
    count = int(option(plain, "block_size")) - (not samples)
    places = np.arange(len(hidden[0]))

    table = tensors.get("embed_tokens.weight", embeddings)
    head = tensors.get("lm_head.weight", lm_head)
    block = _block_rows(plain, table, int(tokens[-1]), count if samples else count + 1)
    block = block * (block.shape[1] ** 0.5 if is_gemma(plain) else 1.0)
    block = block + _log_snr_rows(tensors, plain, len(block))

    context = linear(tensors, "fc", np.concatenate(hidden, axis=-1))
    context = norm(tensors, "hidden_norm", context, body)
    causal = causal_layers(plain, body, non_causal_default=False)
    x = run_block(tensors, body, context, block, places, causal)
    states = norm(tensors, "norm", x, body)[-count:]

    base = softcap(states @ head.T, option(plain, "final_logit_softcapping"))
    return _walk(tensors, plain, base, states, int(tokens[-1]), chosen, len(lm_head))


def anchor_samples(config: Config) -> bool:
    """Return whether row 0, the anchor's, drafts the position after it.

    `sample_from_anchor` decides. Without it, the number of proposals decides: true if
    the number is block_size, false if it is block_size - 1. The default is true.
    """
    said = option(config, "sample_from_anchor")
    if said is not None:
        return bool(said)
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    proposals = methods[0].get("speculative_tokens")
    missing = None if proposals is None else option(config, "block_size") - proposals
    if missing in (0, 1):
        return bool(missing == 0)
    return True


def _block_rows(config: Config, table: Array, anchor: int, rows: int) -> Array:
    """Embeddings [rows, H] of the anchor and the mask tokens."""
    mask = int(option(config, "mask_token_id"))
    return np.asarray(table[[anchor] + [mask] * (rows - 1)], dtype=np.float64)


def _log_snr_rows(weights: Weights, config: Config, rows: int) -> Array:
    """Return the rows that PrismML's conditioning adds to the embeddings: [rows, H].

    The anchor has level `max_log_snr`, masks `min_log_snr`; t = 1000 (level - min) /
    (max - min); fc2 silu(fc1 [sin t f | cos t f]), f_i = 10000^(-i/64).
    """
    if "log_snr_fc1.weight" not in weights or not config.get(
        "log_snr_conditioning", True
    ):
        return np.zeros((rows, 1))
    low, high = float(config["min_log_snr"]), float(config["max_log_snr"])
    levels = np.array([high] + [low] * (rows - 1))
    times = 1000.0 * (levels - low) / (high - low)
    angles = times[:, None] * 10000.0 ** (-np.arange(64) / 64.0)
    features = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    inner = silu(linear(weights, "log_snr_fc1", features))
    return linear(weights, "log_snr_fc2", inner)


def _walk(
    weights: Weights,
    config: Config,
    base: Array,
    states: Array,
    anchor: int,
    chosen: Sequence[int] | None,
    vocabulary: int,
) -> Array:
    """Add to each row of base logits [k, Vd] the bias of the id drafted before."""
    ids = target_ids(weights, base.shape[1])
    markov = MarkovHead(weights, config)
    previous, logits = anchor, []
    for step, (row, g) in enumerate(zip(base, states, strict=True)):
        full = to_target(row + markov.bias(previous, g), ids, vocabulary)
        previous = predecessor_choice(full, chosen, step)
        logits.append(full)
    return np.stack(logits)


class MarkovHead:
    """The bias from the id drafted before; a new object for every block.

    vanilla: W2 W1[prev]. gated: W2 (sigmoid(Wg [g | e] + b) * e) with e = W1[prev].
    rnn: o_g, o_c, o_o = split3(Wj [s | e | g] + b); bias W2 tanh(o_o);
    s' = sigmoid(o_g) s + (1 - sigmoid(o_g)) tanh(o_c), from s = 0.
    """

    def __init__(self, weights: Weights, config: Config):
        self._weights = weights
        self._kind = option(config, "markov_head_type", "vanilla")
        self._embedding = weights.get("markov_head.markov_w1.weight")
        rank = 0 if self._embedding is None else self._embedding.shape[1]
        self._state = np.zeros(rank)

    def bias(self, previous: int, g: Array) -> Array:
        """The bias [Vd] after target id `previous`, for row g [H]; advances the rnn."""
        if self._embedding is None:
            return np.zeros(1)
        e = self._embedding[previous]
        if self._kind == "gated":
            gates = linear(
                self._weights, "markov_head.gate_proj", np.concatenate([g, e])
            )
            e = sigmoid(gates) * e
        elif self._kind == "rnn":
            joined = np.concatenate([self._state, e, g])
            made = linear(self._weights, "markov_head.joint_proj", joined)
            gate, candidate, out = np.split(made, 3)
            keep = sigmoid(gate)
            self._state = keep * self._state + (1.0 - keep) * np.tanh(candidate)
            e = np.tanh(out)
        return linear(self._weights, "markov_head.markov_w2", e)

"""The Markov head of a DSpark drafter: each token adds a bias to the next one's logits.

Let e = W1[the previous token], g the state of the block's row that predicts the next
token, and W2 a projection to the logits:

    vanilla   W2 e
    gated     W2 (sigmoid(G [g | e] + b) * e)
    rnn       o, c, out = thirds of J [s | e | g] + b;  W2 tanh(out), and then
              s = sigmoid(o) * s + (1 - sigmoid(o)) * tanh(c), from 0 in every block

Loading adds b if the checkpoint has it.
"""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_speculation.models.dspark.config import Markov


class MarkovHead(nn.Module):
    """Makes biases of logits from the previous token; for the kinds see the module.

    `dim` is the size of a row's state, and `rank` that of an embedding.
    """

    def __init__(
        self, kind: Markov, dim: int, rank: int, rows: int, columns: int
    ) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(rows, rank)
        self.markov_w2 = nn.Linear(rank, columns, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(dim + rank, rank, bias=False)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + dim, 3 * rank, bias=False)

    def bias(
        self, state: mx.array, token: mx.array, memory: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        """Return the bias of the logits, [1, columns], and the next token's `memory`.

        `state` is g, [1, dim], `token` the previous token, [1], and `memory` s, which
        is None for the first drafted token and for other kinds than "rnn".
        """
        before: mx.array = self.markov_w1(token)
        if "gate_proj" in self:
            joined = mx.concatenate([state, before], axis=-1)
            return self.markov_w2(mx.sigmoid(self.gate_proj(joined)) * before), None
        if "joint_proj" not in self:
            return self.markov_w2(before), None
        if memory is None:
            memory = mx.zeros_like(before)
        joined = mx.concatenate([memory, before, state], axis=-1)
        gate, new, out = mx.split(self.joint_proj(joined), 3, axis=-1)
        gate = mx.sigmoid(gate)
        return self.markov_w2(mx.tanh(out)), gate * memory + (1 - gate) * mx.tanh(new)


class LogSnrEmbedding(nn.Module):
    """Layers that turn a row's noise level into a vector to add to its embedding."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.log_snr_fc1 = nn.Linear(_FEATURES, dim, bias=False)
        self.log_snr_fc2 = nn.Linear(dim, dim, bias=False)


_FEATURES = 128


def level_features(levels: Sequence[float], least: float, most: float) -> mx.array:
    """Return [sin(t f) | cos(t f)] of levels, float32 [levels, 128].

    t goes from 0 for the least level to 1000 for the most; f_i = 10000 ** (-i / 64).
    """
    half = _FEATURES // 2
    times = 1000 * (np.array(levels) - least) / (most - least)
    # In float64, since float32 is too inexact for angles up to 1000.
    angles = times[:, None] * 10000.0 ** (-np.arange(half) / half)
    features = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)
    return mx.array(features.astype(np.float32))

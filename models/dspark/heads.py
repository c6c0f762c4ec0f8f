"""The two small heads of a DSpark drafter: what the draft before adds, and confidence.

With e = W1[the token before], g the block's state, and W2 back to the vocabulary:

    vanilla   W2 e
    gated     W2 (sigmoid(G [g | e] + b) * e)
    rnn       o, c, out = thirds of J [s | e | g] + b;  W2 tanh(out), and then
              s = sigmoid(o) * s + (1 - sigmoid(o)) * tanh(c), from 0 in every block
"""

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.models.dspark.config import Markov


class MarkovHead(nn.Module):
    """What the token before adds to logits.

    Args:
        kind: which of the three.
        dim: of the block's states.
        rank: of an embedding.
        rows: how many token ids may come before.
        columns: of the logits.
    """

    def __init__(
        self, kind: Markov, dim: int, rank: int, rows: int, columns: int
    ) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(rows, rank)
        self.markov_w2 = nn.Linear(rank, columns, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(dim + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + dim, 3 * rank)

    def before(self, token: mx.array) -> mx.array:
        """Return the embedding of the token before, [1, rank] of [1]."""
        found: mx.array = self.markov_w1(token)
        return found

    def bias(
        self, state: mx.array, before: mx.array, memory: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        """Return what is added to logits, [1, columns], and the next memory.

        Args:
            state: the block's, [1, dim].
            before: the embedding of the token before, [1, rank].
            memory: what the draft before returned; None: this is the first one.
        """
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


class ConfidenceHead(nn.Module):
    """The probability that a draft is accepted, before it is known.

    Args:
        width: numbers that it reads: of the block's state, and of the embedding of the
            token before, or of the state alone.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def logit(self, state: mx.array, before: mx.array | None) -> mx.array:
        """Return the logit of the probability, float32 [1].

        Args:
            state: the block's, [1, dim].
            before: the embedding of the token before, [1, rank], if it reads that.
        """
        read = state if before is None else mx.concatenate([state, before], axis=-1)
        weight = self.proj.weight.astype(mx.float32)
        found = read.astype(mx.float32) @ weight.T + self.proj.bias.astype(mx.float32)
        return found[:, 0]


class LogSnrEmbedding(nn.Module):
    """What the level of noise of a row adds to its embedding."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.log_snr_fc1 = nn.Linear(_FEATURES, dim)
        self.log_snr_fc2 = nn.Linear(dim, dim)


_FEATURES = 128


def level_features(levels: mx.array, least: float, most: float) -> mx.array:
    """Return [sin(t f) | cos(t f)] of levels [rows], float32 [rows, 128].

    t goes from 0 for the least level to 1000 for the most; f_i = 10000 ** (-i / 64).
    """
    half = _FEATURES // 2
    times = 1000 * (levels - least) / (most - least)
    angles = times[:, None] * mx.power(10000.0, -mx.arange(half) / half)
    return mx.concatenate([mx.sin(angles), mx.cos(angles)], axis=-1)

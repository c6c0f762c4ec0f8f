"""Drafters that know the text and are wrong with a given probability."""

import random

import mlx.core as mx

from mlx_speculation.engine.drafters.base import Choose, Proposal
from mlx_speculation.engine.prompt import Sequence


class ScriptedDrafter:
    """Proposes the tokens of a known text, of which the share `right` is unchanged.

    If `ragged`, it proposes from `least` to `limit` tokens; otherwise always `limit`.
    """

    def __init__(
        self,
        text: list[int],
        right: float,
        vocab: int = 256,
        seed: int = 0,
        ragged: bool = False,
        least: int = 1,
    ) -> None:
        self._text = text
        self._right = right
        self._vocab = vocab
        self._random = random.Random(seed)
        self._ragged = ragged
        self._least = least
        self.calls: list[str] = []

    def begin(self, sequence: Sequence) -> None:
        self.calls = ["begin"]

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        self.calls.append("propose")
        length = self._random.randint(self._least, limit) if self._ragged else limit
        start = len(sequence.tokens)
        known = (self._text[start : start + length] + [0] * length)[:length]
        return Proposal(
            mx.array([self._said(token) for token in known], dtype=mx.int32)
        )

    def settle(self, accepted: int) -> None:
        self.calls.append(f"settle {accepted}")

    def discard(self) -> None:
        self.calls.append("discard")

    def _said(self, token: int) -> int:
        if self._random.random() < self._right:
            return token
        return (token + self._random.randint(1, self._vocab - 1)) % self._vocab


class TurningDrafter(ScriptedDrafter):
    """Proposes drafts of every kind, so that one text has every outcome of a round.

    A draft is right, right only at first, wrong from its first token, a single right
    token, or empty.
    """

    def __init__(self, text: list[int], vocab: int = 256, seed: int = 0) -> None:
        super().__init__(text, right=1.0, vocab=vocab, seed=seed)
        self._right_ones = 0
        self.settled: list[tuple[int, int]] = []  # counts by draft: accepted, right
        self.empty = 0

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        self.calls.append("propose")
        draw = self._random
        kind = draw.choice(("right", "right", "part", "part", "wrong", "one", "empty"))
        length = {"one": 1, "empty": 0}.get(kind, limit)
        start = len(sequence.tokens)
        said = (self._text[start : start + length] + [0] * length)[:length]
        first = {"wrong": 0, "part": draw.randrange(limit)}.get(kind, length)
        for place in range(first, length):
            # Tokens after a wrong one may be right again, and are not accepted.
            if place == first or draw.random() < 0.5:
                other = draw.randrange(1, self._vocab)
                said[place] = (said[place] + other) % self._vocab
        self._right_ones = min(first, length)
        self.empty += not length
        return Proposal(mx.array(said, dtype=mx.int32))

    def settle(self, accepted: int) -> None:
        super().settle(accepted)
        self.settled.append((accepted, self._right_ones))

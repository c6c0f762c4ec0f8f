"""Drafts of MTP heads in rounds equal numpy's, which computes all positions anew."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_speculation.models.mtp import MtpCache
from support.covering import covering
from support.drafters.mtp_bench import Bench, assert_close, make_bench, states
from support.references.blocks.primitives import Array
from support.references.mtp.families import FAMILIES

PROMPT = 6
# Numbers of accepted and of drafted tokens, by round.
ROUNDS = [(0, 3), (3, 3), (1, 2), (2, 3), (0, 1), (1, 3), (0, 1)]
# The other families handle rounds like one of these; test_mtp_reference.py compares how
# they compute a position.
QUICK = (
    *("ernie", "glm4_moe", "deepseek_v32", "longcat_flash", "bailing_hybrid", "mimo"),
    *("mimo_v2_flash", "nemotron_h", "qwen3_5", "step3p5"),
)
POSITIONS = PROMPT + sum(accepted + 1 for accepted, _ in ROUNDS)


class Rounds:
    """A head that drafts tokens of a script, and records the logits of each draft."""

    def __init__(self, here: Bench) -> None:
        self.here = here
        self.slots = MtpCache(here.load())
        generator = np.random.default_rng(9)
        size, vocab = here.hidden.shape[1], len(here.embedding)
        self.hidden = generator.standard_normal((POSITIONS, size))
        self.tokens: list[int] = generator.integers(0, vocab, PROMPT).tolist()
        self.script: list[int] = generator.integers(0, vocab, 3 * POSITIONS).tolist()
        self.drafted: list[int] = []
        self.logits: list[mx.array] = []

    def choose(self, logits: mx.array, ids: mx.array | None = None) -> mx.array:
        assert ids is None
        self.logits.append(logits)
        self.drafted.append(self.script.pop())
        return mx.array(self.drafted[-1:])

    def draft(self, count: int) -> None:
        """Draft after all committed tokens. The last token has no hidden state yet."""
        stop = len(self.tokens) - 1
        self.drafted, self.logits = [], []
        hidden = states(self.hidden[self.slots.end : stop])
        self.slots.draft(hidden, stop, self.tokens, self.choose, count)
        mx.eval(self.logits)

    def settle(self, accepted: int) -> None:
        self.slots.commit()
        self.tokens += [*self.drafted[:accepted], self.script.pop()]

    def expected(self) -> list[Array]:
        stop, family = len(self.tokens) - 1, self.here.family
        known, rows = np.array([*self.tokens, *self.drafted]), []
        inputs = self.hidden[:stop]
        for step in range(len(self.drafted)):
            if family.chains:
                tokens = known[1 + step : 1 + step + stop]
                out = self.here.expected(inputs, tokens, step)
                inputs = out.recycled
            else:
                out = self.here.expected(inputs, known[1 : 1 + len(inputs)])
                inputs = np.concatenate([inputs, out.recycled[-1:]])
            rows.append(out.logits[-1])
        return rows


@pytest.mark.parametrize(
    ("name", "fed", "undone"),
    covering(FAMILIES, (0, PROMPT - 2), (False, True), quick=(0, QUICK)),
)
def test_drafts_of_rounds_equal_those_of_all_slots_computed_anew(
    tmp_path: Path, name: str, fed: int, undone: bool
) -> None:
    rounds = Rounds(make_bench(tmp_path, FAMILIES[name]))
    depth = rounds.here.load().head.depth or 3
    if fed:
        rounds.slots.feed(states(rounds.hidden[:fed]), fed, rounds.tokens)
    for accepted, count in ROUNDS:
        count = min(count, depth)
        if undone:
            rounds.draft(count)
            if accepted:  # a commit can be undone too
                rounds.slots.commit()
            rounds.slots.rollback()
        rounds.draft(count)
        for ours, theirs in zip(rounds.logits, rounds.expected(), strict=True):
            assert_close(ours, theirs)
        rounds.settle(min(accepted, count))

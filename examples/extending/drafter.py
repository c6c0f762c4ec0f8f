"""A drafter of your own: after a token it proposes what followed it the last time.

A wrong proposal costs time and never changes the text. See `engine.Drafter`.
"""

import warnings
from itertools import pairwise
from typing import Any

from mlx_speculation import (
    BatchGenerator,
    DrafterFaultWarning,
    Sampling,
    SpeculativeGenerator,
    demo_models,
)
from mlx_speculation.engine import Choose, Draft, Proposal, Sequence
from mlx_speculation.engine.drafters.base import OpenDrafter
from mlx_speculation.models import Lane

# isort: split
import mlx.core as mx  # after mlx_speculation, which chooses a fast BLAS


class Pairs:
    """Proposes a chain of tokens, each the latest that followed the one before."""

    def begin(self, sequence: Sequence) -> None:
        self.next: dict[int, int] = {}

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        known = sequence.tokens
        self.next.update(pairwise(known))
        chain = [known[-1]]
        while len(chain) <= limit and chain[-1] in self.next:
            chain.append(self.next[chain[-1]])
        return Proposal(mx.array(chain[1:], mx.uint32), source="pairs")

    def settle(self, accepted: int) -> None: ...

    def discard(self) -> None: ...


generator = SpeculativeGenerator.from_pretrained(
    demo_models()["dense"], draft=Pairs(), draft_length=4
)
prompt = "def area(width, height):"
drafted = generator.generate(prompt, max_tokens=32)
plain = generator.generate(prompt, max_tokens=32, draft_length=0)

assert drafted.tokens == plain.tokens
print(drafted.stats.sources["pairs"])


class Broken(Pairs):
    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        raise RuntimeError("out of ideas")


broken = SpeculativeGenerator(
    generator.model, generator.tokenizer, draft=Broken(), draft_length=4
)
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DrafterFaultWarning)
    result = broken.generate(prompt, max_tokens=32)

assert result.tokens == plain.tokens
print(result.stats.drafter_faults[0].reason)


class OpenPairs(Pairs, OpenDrafter):
    """The drafter of one request; it also knows the pairs of earlier requests."""

    def __init__(self, known: dict[int, int]) -> None:
        self.known = known

    def begin(self, sequence: Sequence) -> None:
        self.next = dict(self.known)

    def remember(self, tokens: Any, answer: int) -> None:
        self.known.update(pairwise(tokens))


class PairsDraft(Draft):
    def __init__(self) -> None:
        self.known: dict[int, int] = {}

    def open(
        self, lane: Lane, sequence: Sequence, draft_cache: list[Any] | None = None
    ) -> OpenPairs:
        return OpenPairs(self.known)


several = SpeculativeGenerator(
    generator.model, generator.tokenizer, draft=PairsDraft(), draft_length=4
)
with BatchGenerator(several) as batch:
    uids = [batch.insert(text, max_tokens=32) for text in (prompt, "import os\n")]
    while batch.waiting or batch.running:
        batch.next()
    results = [batch.result(uid) for uid in uids]

assert results[0].tokens == plain.tokens
assert batch.stats.alone == {}  # no reason to run a request by itself
assert batch.stats.mean_rows > 1  # requests in one forward of the target
print([result.stats.accepted for result in results])


class Rising:
    """Drafts with logits; after token id n, the id n + 1 is the likeliest."""

    def begin(self, sequence: Sequence) -> None: ...

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        token, ahead, choices = mx.array(sequence.tokens[-1:]), None, []
        for _ in range(limit):
            logits = mx.where(mx.arange(2048) == token + 1, 5.0, 0.0)  # [vocab]
            choices.append(choose(logits[None], sequence.rows(ahead)))
            token, ahead = choices[-1].tokens, Proposal.of(choices).tokens
        return Proposal.of(choices, source="rising")

    def settle(self, accepted: int) -> None: ...

    def discard(self) -> None: ...


rising = SpeculativeGenerator(
    generator.model, generator.tokenizer, draft=Rising(), draft_length=2
)
sampling = Sampling(temperature=0.9, seed=3)
result = rising.generate(prompt, max_tokens=16, sampling=sampling)
plain = rising.generate(prompt, max_tokens=16, sampling=sampling, draft_length=0)

assert result.tokens == plain.tokens
print(result.stats.sources["rising"])

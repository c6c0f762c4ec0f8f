"""Origins of tokens agree with the statistics and the drafts."""

from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from hypothesis import given
from hypothesis import strategies as st

from mlx_speculation import Sampling, SpeculativeGenerator, allowed_tokens, pure
from mlx_speculation.engine import Origin, Stream
from mlx_speculation.engine.drafters.base import Choose, Proposal
from mlx_speculation.engine.prompt import Sequence
from support.drafters.scripted_draft_lengths import Planned
from support.drafters.scripted_drafter import ScriptedDrafter
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer

PROMPT = [(5 * i * i + 3) % 256 for i in range(21)]
SAMPLED = Sampling(temperature=0.8, seed=4)
TOKENS = 18


@cache
def known() -> tuple[nn.Module, list[int]]:
    model = build("llama")
    plain = SpeculativeGenerator(model, byte_tokenizer())
    result = plain.generate(PROMPT, max_tokens=TOKENS, sampling=SAMPLED, stop_tokens=())
    assert result.origins == (Origin("step"),) * TOKENS
    return model, result.tokens


class Noted(ScriptedDrafter):
    """Records the position and the tokens of each draft."""

    drafts: dict[int, list[int]]

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        draft = super().propose(sequence, limit, choose)
        self.drafts = getattr(self, "drafts", {})
        tokens: Any = draft.tokens.tolist()
        self.drafts[len(sequence.tokens)] = tokens
        return draft


def opaque(tokens: mx.array, logits: mx.array) -> mx.array:
    """A processor; unless it is marked `pure`, rows are decided in order."""
    return logits


def expected(stream: Stream) -> list[Origin]:
    """Return the origins that the rounds' counts imply, before a cut at the end."""
    origins = []
    for _, outcome in stream.decisions:
        if outcome.behind or not outcome.drafted:
            origins.append(Origin("step"))
        if outcome.drafted:
            origins += [Origin("accepted", i) for i in range(int(outcome.accepted))]
            whole = outcome.accepted == outcome.drafted
            origins.append(Origin("bonus" if whole else "correction"))
    return origins


@given(
    right=st.sampled_from([0.0, 0.5, 0.8, 1.0]),
    seed=st.integers(0, 99),
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    least=st.integers(0, 1),
    processor=st.sampled_from([None, pure(opaque), opaque]),
    acceptance=st.sampled_from(["keyed", "rejection"]),
    budget=st.integers(1, TOKENS),
    constrained=st.booleans(),
)
def test_origins_are_what_the_statistics_count(
    right: float,
    seed: int,
    lengths: list[int],
    least: int,
    processor: Any,
    acceptance: Any,
    budget: int,
    constrained: bool,
) -> None:
    model, text = known()
    drafter = Noted(PROMPT + text, right, seed=seed, ragged=True, least=least)
    generator = SpeculativeGenerator(
        model, byte_tokenizer(), draft=drafter, acceptance=acceptance
    )
    stream = generator.stream(
        PROMPT,
        max_tokens=budget,
        sampling=Sampling(
            temperature=0.8,
            seed=4,
            logits_processors=() if processor is None else (processor,),
        ),
        stop_tokens=(),
        draft_length=Planned(lengths),
        constraint=allowed_tokens(range(256)) if constrained else None,
        explain=True,
    )
    chunks = list(stream)
    result, stats = stream.result, stream.stats
    assert [chunk.origin for chunk in chunks] == list(result.origins)
    assert len(result.origins) == len(result.tokens) == budget
    assert list(result.origins) == expected(stream)[:budget]

    places = [o.place for o in result.origins if o.place is not None]
    lost = stats.accepted - len(places)  # cut off at the budget
    assert lost == 0 or result.origins[-1].writer == "accepted"
    for place, reached in enumerate(stats.reached):
        assert reached - places.count(place) in ((0,) if not lost else (0, 1))
    by_draft = [o for o in result.origins if o.writer in ("correction", "bonus")]
    assert stats.drafts - len(by_draft) in (0, 1)

    position = start = len(PROMPT)
    for token, origin in zip(result.tokens, result.origins, strict=True):
        if origin.place == 0:
            start = position
        if origin.place is not None:
            # A draft made during a plain step begins with a guess of that step's
            # token, at the position start - 1.
            round_start = next(at for at in (start, start - 1) if at in drafter.drafts)
            assert drafter.drafts[round_start][position - round_start] == token
        position += 1

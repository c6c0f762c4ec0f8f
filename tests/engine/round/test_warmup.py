"""On a device that compiles each new shape, no round is the first of its shape.

The CPU compiles none. The tests mark new shapes as expensive.
"""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import pytest

from mlx_speculation import SpeculativeGenerator
from mlx_speculation.engine.round import warmup
from mlx_speculation.engine.stream_factory import requests
from mlx_speculation.models import LaneRound, shape_of_round
from support.drafters.scripted_draft_lengths import Planned
from support.drafters.scripted_drafter import ScriptedDrafter
from support.identity import plain_text, prompt_of
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer

LENGTHS = [1, 3, 16, 0, 0, 2, 7]


@dataclass
class Forwards:
    """Rehearsed shapes with the text's length, and shapes that a round met first."""

    rehearsed: list[tuple[int, tuple[int, int]]] = field(default_factory=list)
    compiled_in_rounds: list[tuple[int, int]] = field(default_factory=list)
    met: set[tuple[int, int]] = field(default_factory=set)


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> Forwards:
    seen = Forwards()
    feed, commit, leave = LaneRound.forward, LaneRound.commit, LaneRound.__exit__

    def forward(self: Any, tokens: mx.array) -> mx.array:
        self.at = self._lane.seen
        fed = shape_of_round(self.at + self._width, tokens.size, by_keys=True)
        self.last = (tokens.size, fed)
        return feed(self, tokens)

    def committed(self: Any, keep: int) -> None:
        if not self._whole:
            if self.last[1] not in seen.met:
                seen.compiled_in_rounds.append(self.last[1])
            seen.met.add(self.last[1])
        self.kept = True
        commit(self, keep)

    def left(self: Any, *error: Any) -> None:
        if not getattr(self, "kept", False) and not self._whole:
            seen.rehearsed.append((self.at, self.last[1]))
            seen.met.add(self.last[1])
        leave(self, *error)

    monkeypatch.setattr(LaneRound, "forward", forward)
    monkeypatch.setattr(LaneRound, "commit", committed)
    monkeypatch.setattr(LaneRound, "__exit__", left)
    return seen


def dear(monkeypatch: pytest.MonkeyPatch, *, by_keys: bool = True) -> None:
    """Make each new number of positions expensive; if `by_keys`, of keys too."""
    monkeypatch.setattr(requests, "cuda_serves", lambda: True)
    monkeypatch.setattr(warmup, "plans_by_keys", lambda caches: by_keys)
    monkeypatch.setattr(warmup, "_say_once", lambda: None)


def texts(family: str, prompt: list[int], tokens: int, **options: Any) -> list[int]:
    """Generate with planned lengths and an often right drafter; check the text."""
    model = build(family)
    known = [*prompt, *plain_text(model, prompt, tokens)]
    drafter = ScriptedDrafter(known, right=0.7)
    generator = SpeculativeGenerator(model, byte_tokenizer(), draft=drafter)
    options = {"draft_length": Planned(LENGTHS), **options}
    result = generator.generate(prompt, max_tokens=tokens, stop_tokens=(), **options)
    assert result.stats.drafted > 0
    assert result.tokens == known[len(prompt) :]
    assert result.stats.drafter_faults == []
    return result.tokens


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5"])
def test_no_round_is_the_first_of_its_shape(
    family: str, monkeypatch: pytest.MonkeyPatch, forwards: Forwards
) -> None:
    dear(monkeypatch)
    texts(family, prompt_of(440), 140)
    assert forwards.compiled_in_rounds == []
    # Shapes of 1024 keys are rehearsed before the text has 512 tokens, one a round.
    ahead = [at for at, (_, keys) in forwards.rehearsed if keys == 1024]
    assert len(ahead) >= 5
    assert all(at < 512 for at in ahead[:5])


def test_without_rehearsals_rounds_meet_new_shapes(forwards: Forwards) -> None:
    texts("llama", prompt_of(440), 140)
    assert len(forwards.compiled_in_rounds) > 5
    assert forwards.rehearsed == []


def test_a_fixed_length_does_not_wait(
    monkeypatch: pytest.MonkeyPatch, forwards: Forwards
) -> None:
    dear(monkeypatch)
    texts("llama", prompt_of(30), 40, draft_length=4)
    assert forwards.rehearsed == []


def test_a_second_text_rehearses_nothing_again(
    monkeypatch: pytest.MonkeyPatch, forwards: Forwards
) -> None:
    dear(monkeypatch, by_keys=False)
    model, prompt = build("llama"), prompt_of(30)
    generator = SpeculativeGenerator(model, byte_tokenizer(), draft="lookup")
    for _ in range(2):
        lengths = Planned(LENGTHS)
        generator.generate(prompt, max_tokens=20, stop_tokens=(), draft_length=lengths)
        assert len(forwards.rehearsed) == 9  # 1 2 3 4 6 8 12 16 24 positions


def test_a_rehearsal_that_fails_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dear(monkeypatch)
    model, prompt = build("qwen3_5"), prompt_of(30)
    generator = SpeculativeGenerator(model, byte_tokenizer(), draft="lookup")
    stream = generator.stream(
        prompt, max_tokens=8, stop_tokens=(), draft_length=Planned(LENGTHS)
    )
    stream.generation.begin()
    feed, left = LaneRound.forward, 4

    def failing(self: Any, tokens: mx.array) -> mx.array:
        nonlocal left
        left -= 1
        if left < 0:
            raise MemoryError("no room for a rehearsal")
        return feed(self, tokens)

    with monkeypatch.context() as patched:
        patched.setattr(LaneRound, "forward", failing)
        with pytest.raises(MemoryError):
            next(stream)
    assert stream.cached_tokens == prompt[:-1]

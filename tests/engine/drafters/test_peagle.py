"""Drafting with a P-EAGLE head: masks, what they change, and the text as it was."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import pytest

from mlx_speculation.engine import PEagleDraft
from mlx_speculation.models.eagle import Eagle
from support.covering import covering
from support.drafters.block_drafts import Greedy
from support.drafters.drafted_targets import (
    PROMPT,
    TARGETS,
    DraftedTargets,
    sampling,
)
from support.identity import plain_text, prompt_of
from support.models.eagle_checkpoints import DIM, PARALLEL, VOCAB, write_eagle

TOKENS = 16
LAYERS = {"llama": (0, 1), "llama(sliding)": (0, 1), "gemma3_text": (0, 1, 2)}


TARGETED = DraftedTargets(TOKENS)
target_of, text_of, generator = TARGETED.target, TARGETED.text, TARGETED.generator


@cache
def draft_of(dialect: str, name: str) -> PEagleDraft:
    """Return a random head on a target."""
    with TemporaryDirectory() as folder:
        written = write_eagle(Path(folder), dialect, LAYERS.get(name, (0, 1, 3)))
        draft: Any = PEagleDraft.from_folder(written, target_of(name))
        assert isinstance(draft, PEagleDraft)
        return draft


@pytest.mark.parametrize(
    ("dialect", "name", "temperature"),
    covering(PARALLEL, TARGETS, (0.0, 0.8)),
)
def test_a_head_leaves_the_text_as_plain_decoding_has_it(
    dialect: str, name: str, temperature: float
) -> None:
    text = text_of(name, temperature)
    result = generator(name, draft_of(dialect, name)).generate(
        text[:PROMPT], max_tokens=TOKENS, sampling=sampling(temperature)
    )
    assert result.tokens == text[PROMPT : PROMPT + TOKENS]
    assert not result.stats.drafter_faults
    assert result.stats.sources["peagle"].drafted >= TOKENS // 2
    assert result.stats.reruns == 0
    if not temperature:
        expected = plain_text(target_of(name), text[:PROMPT], TOKENS)
        assert result.tokens == expected


class Oracle:
    """In the place of a head's layers: says what comes next, and checks its input.

    Each position of its caches holds its number, and the token that is paired with it.
    """

    def __init__(
        self, draft: PEagleDraft, text: list[int], wrong: Callable[[int], bool]
    ) -> None:
        eagle: Any = draft.eagle
        self._text, self._wrong = text, wrong
        with draft.taps.collect() as found:
            draft.model(mx.array([text]))
        self._states = eagle.states(found)
        self.rounds: list[tuple[int, int]] = []
        self.held: list[list[int]] = []
        eagle.history = self.history
        eagle._run = self.run
        eagle._output = self.output
        eagle.head._ids = None

    def history(
        self, hidden: mx.array, tokens: mx.array, caches: Sequence[Any]
    ) -> None:
        """Write pairs of committed text."""
        self.run(0, hidden, tokens, caches)

    def run(
        self, layer: int, hidden: mx.array, tokens: mx.array, caches: Sequence[Any]
    ) -> mx.array:
        """Write pairs and masks; return states that hold the next ids."""
        start, ids = caches[0].offset, [int(token) for token in tokens[0]]
        pairs = ids.index(VOCAB - 1) if VOCAB - 1 in ids else len(ids)
        assert ids[:pairs] == self._text[start + 1 : start + 1 + pairs]
        expected = self._states[:, start : start + pairs]
        assert mx.allclose(hidden[:, :pairs], expected, atol=1e-3)
        masks = len(ids) - pairs
        assert ids[pairs:] == [VOCAB - 1] * masks
        self.rounds.append((pairs, masks))
        rows = mx.array([[p, t] for p, t in enumerate(ids, start)], mx.float32)
        for held in caches:
            keys, _ = held.update_and_fetch(rows[None, None], rows[None, None])
        self.held = [[int(p), int(t)] for p, t in keys[0, 0].tolist()]
        guesses = [self._guess(start + 2 + i) for i in range(len(ids))]
        state = mx.array(guesses, mx.float32)[None, :, None]
        return mx.broadcast_to(state, (1, len(ids), DIM))

    def output(self, layer: int, states: mx.array) -> Any:
        """Return logits of what states hold."""
        ids = states[..., :1].astype(mx.int32)
        logits = mx.where(mx.arange(VOCAB) == ids, 100.0, -100.0)
        return type("Output", (), {"logits": logits})

    def _guess(self, position: int) -> int:
        if position >= len(self._text):
            return 0
        return (self._text[position] + self._wrong(position)) % VOCAB


def oracle(
    name: str, text: list[int], wrong: Callable[[int], bool] = lambda position: False
) -> tuple[PEagleDraft, Oracle]:
    """Return a draft with an oracle in the place of the head's layers."""
    # A text with the mask's own id could not be told from masks.
    assert VOCAB - 1 not in text
    with TemporaryDirectory() as folder:
        written = write_eagle(Path(folder), "aws", LAYERS.get(name, (0, 1, 3)))
        draft: Any = PEagleDraft.from_folder(written, target_of(name))
    return draft, Oracle(draft, text, wrong)


@pytest.mark.parametrize(
    ("name", "length", "temperature"),
    covering(TARGETS, (4, 1), (0.0, 0.8), pairs=[(1, 2)]),
)
def test_an_oracle_is_always_right(name: str, length: int, temperature: float) -> None:
    text = text_of(name, temperature)
    draft, knowing = oracle(name, text)
    result = generator(name, draft, draft_length=length).generate(
        text[:PROMPT], max_tokens=TOKENS, sampling=sampling(temperature)
    )
    assert not result.stats.drafter_faults
    assert result.tokens == text[PROMPT : PROMPT + TOKENS]
    assert result.stats.acceptance_rate == 1.0
    assert result.stats.mean_accepted_length > length + 0.7
    # One forward a round.
    assert len(knowing.rounds) == result.stats.drafts


@pytest.mark.parametrize(("name", "every"), covering(TARGETS, (2, 3)))
def test_the_caches_hold_pairs_of_committed_text(name: str, every: int) -> None:
    text = text_of(name, 0.0)
    draft, knowing = oracle(name, text, lambda position: position % every == 0)
    stream = generator(name, draft, draft_length=4).stream(
        text[:PROMPT], max_tokens=TOKENS
    )
    assert [chunk.token for chunk in stream] == text[PROMPT : PROMPT + TOKENS]
    assert not stream.result.stats.drafter_faults
    *_, (_, masks) = knowing.rounds
    held = knowing.held[: len(knowing.held) - masks]
    assert held == [[i, text[i + 1]] for i in range(len(held))]
    assert len(held) > PROMPT


def logits_of(draft: PEagleDraft, tokens: list[int], count: int) -> list[mx.array]:
    """Return the logits of drafts behind tokens."""
    with draft.taps.collect() as states:
        draft.model(mx.array([tokens[:-1]]))
    eagle, choose = draft.eagle, Greedy()
    hidden = eagle.states(states)
    eagle.draft(hidden, mx.array([tokens[1:]]), eagle.new_caches(), count, choose)
    return [logits for logits, _ in choose.seen]


@pytest.mark.parametrize("dialect", PARALLEL)
def test_drafts_depend_on_masks_as_they_should(dialect: str) -> None:
    draft, tokens = draft_of(dialect, "qwen3_5"), prompt_of(20)
    long = logits_of(draft, tokens, 5)
    # Not on how many masks come behind.
    for count in (1, 3):
        found = logits_of(draft, tokens, count)
        for one, same in zip(found, long, strict=False):
            assert mx.allclose(one, same, atol=1e-4)
    # The first draft is that of an EAGLE-3 head with the same weights.
    with draft.taps.collect() as states:
        draft.model(mx.array([tokens[:-1]]))
    chain = Eagle(draft.head, draft.taps, draft.eagle.layers)
    out = chain.rows(
        chain.states(states), mx.array([tokens[1:]]), draft.eagle.new_caches()
    )
    assert mx.allclose(out.logits[:, -1], long[0], atol=1e-4)
    # What masks hold counts from the second on.
    kept: Any = draft.head.mask_hidden
    draft.head.mask_hidden = -kept
    other: list[mx.array] = logits_of(draft, tokens, 5)
    draft.head.mask_hidden = kept
    assert mx.allclose(other[0], long[0], atol=1e-4)
    assert not any(
        mx.allclose(a, b, atol=1e-2) for a, b in zip(other[1:], long[1:], strict=True)
    )


def test_the_named_number_of_drafts_is_the_most() -> None:
    text = text_of("llama", 0.0)
    named = generator("llama", draft_of("peagle", "llama"), draft_length=9)
    stats = named.generate(text[:PROMPT], max_tokens=TOKENS).stats
    assert 0 < stats.drafted <= 5 * stats.drafts
    free = generator("llama", draft_of("aws", "llama"), draft_length=9)
    stats = free.generate(text[:PROMPT], max_tokens=TOKENS).stats
    assert stats.drafted > 5 * stats.drafts

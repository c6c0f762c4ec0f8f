"""Indexes grow piece by piece, stay valid after an interrupt, and stay small."""

import random
import sys
from itertools import pairwise
from random import Random
from threading import Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_speculation.engine.lookup.automaton import BREAK, NO_MATCH, SuffixAutomaton
from mlx_speculation.engine.lookup.lookup import (
    BEFORE,
    CHUNK,
    AnswerHistory,
    Cursor,
    Found,
    GrowingIndex,
    Lookup,
    SharedPlaces,
    TextPool,
)

tokens_of = st.lists(st.integers(0, 3), max_size=40)


@given(tokens_of, tokens_of, st.integers(0, 40))
def test_a_cursor_finds_what_a_new_search_finds(
    indexed: list[int], text: list[int], split: int
) -> None:
    """This holds while the index and the text grow."""
    automaton, cursor = SuffixAutomaton(), Cursor()
    for token in indexed[:split]:
        automaton.append(token)
    cursor.move(automaton, text[:split])
    for token in indexed[split:]:
        automaton.append(token)
    match = NO_MATCH
    for token in text:
        match = automaton.follow(match, token)
    assert cursor.move(automaton, text) == automaton.with_successor(match)


def test_a_cursor_finds_what_another_request_has_added() -> None:
    automaton, cursor = SuffixAutomaton(), Cursor()
    for token in [3, 9]:
        automaton.append(token)
    assert cursor.move(automaton, [1, 2, 3]).length == 1
    for token in [1, 2, 3, 8]:
        automaton.append(token)
    assert cursor.move(automaton, [1, 2, 3]).length == 3


def test_a_prompt_of_150_000_tokens_is_indexed_in_short_pieces() -> None:
    tokens = random.Random(1).choices(range(5000), k=150_000)
    lookup, pieces = Lookup(SharedPlaces()), 0
    index = lookup.read_ahead([]) and lookup._text
    assert isinstance(index, GrowingIndex)
    done = [0]
    while not lookup.read_ahead(tokens):
        pieces += 1
        done.append(len(index.automaton.tokens))
        if pieces == 3:  # a proposal indexes one piece too, and uses what is there
            assert isinstance(lookup.propose(tokens, 8), Found)
            done.append(len(index.automaton.tokens))
    assert max(b - a for a, b in pairwise(done)) == CHUNK
    assert len(index.automaton.tokens) == len(tokens)


def test_turns_go_on_with_the_index_of_their_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No token is indexed twice, also if eight sessions take turns."""
    counts = [0]
    append = SuffixAutomaton.append

    def counted(self: SuffixAutomaton, token: int) -> None:
        counts[0] += 1
        append(self, token)

    monkeypatch.setattr(SuffixAutomaton, "append", counted)
    shared = SharedPlaces()
    texts: list[list[int]] = [[session] * 3 for session in range(8)]
    for turn in range(4):
        for session, text in enumerate(texts):
            lookup = Lookup(shared)
            text += [100 + turn, 9, session]
            lookup.propose(text, 4)
            answer = len(text)
            text += [session, 7]
            lookup.propose(text, 4)
            lookup.end(text, answer)
    assert counts[0] == sum(map(len, texts))


def test_a_prompt_that_goes_on_otherwise_begins_anew() -> None:
    pool = TextPool(100)
    index = GrowingIndex([1, 2, 3])
    index.catch_up()
    pool.give(index)
    assert pool.take([1, 2, 4, 5]) is not index
    assert pool.take([1, 2]) is not index
    assert pool.take([1, 2, 3, 4]) is index
    assert pool.take([1, 2, 3, 4]) is not index


def test_a_pool_and_a_history_forget_the_oldest_beyond_their_limit() -> None:
    pool, history = TextPool(10), AnswerHistory(40)
    indexes = []
    for number in range(5):
        indexes.append(GrowingIndex([number] * 4))
        indexes[-1].catch_up()
        pool.give(indexes[-1])
    assert [pool.take([n] * 5) is indexes[n] for n in range(5)] == [False] * 3 + [
        True
    ] * 2
    for number in range(50):
        history.add([number] * 30, 28 - number % 20)
        kept = [each.tokens for each in history.generations]
        assert sum(map(len, kept)) <= 40
        assert kept[0][-2] == number
    history.add([1] * 1000, 0)
    assert len(history.generations[0].tokens) == 20


def test_a_text_may_end_while_another_one_takes_its_index() -> None:
    """The garbage collector can end a stream, and so return an index, at any time."""
    pool, index, other = TextPool(10), GrowingIndex([1, 2, 3]), GrowingIndex([9] * 9)
    for each in (index, other):
        each.catch_up()

    class Collected(list[int]):
        def __getitem__(self, place: Any) -> Any:
            pool.give(other)
            return super().__getitem__(place)

    pool.give(index)
    assert pool.take(Collected([1, 2, 3, 4])) is index
    assert pool.take([*other.tokens, 1]) is other


@pytest.mark.parametrize("call", range(1, 40, 3))
def test_an_interrupted_index_is_made_anew(
    call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, calls = GrowingIndex(random.Random(2).choices(range(3), k=30)), [0]
    step = SuffixAutomaton._set

    def interrupted(self: SuffixAutomaton, *args: int) -> None:
        calls[0] += 1
        if calls[0] == call:
            raise KeyboardInterrupt
        step(self, *args)

    monkeypatch.setattr(SuffixAutomaton, "_set", interrupted)
    with pytest.raises(KeyboardInterrupt):
        index.catch_up()
    index.catch_up()
    fresh = GrowingIndex(index.tokens)
    fresh.catch_up()
    assert vars(index.automaton) == vars(fresh.automaton)


def test_an_answer_is_held_with_a_few_tokens_before_it() -> None:
    history = AnswerHistory(100)
    history.add(list(range(30)), 20)
    assert history.generations[0].tokens[0] == 20 - BEFORE
    history.add([1, 2], 2)  # an empty answer is not added
    assert len(history.generations[0].tokens) == 10 + BEFORE + 1


places = st.lists(tokens_of, min_size=4, max_size=4)


@given(places, st.integers(0, 3))
def test_the_longest_match_of_all_places_is_proposed(
    each: list[list[int]], last: int
) -> None:
    """The reference is a plain search in text, prediction, history and documents."""
    text, prediction, answer, document = each
    text = [*text, last]
    shared = SharedPlaces([document], history=200)
    shared.history.add(answer, 0)
    proposal = Lookup(shared, prediction).propose(text, 6)
    best = (0, 0, [-1])
    sources = [text, [*prediction, BREAK], [*answer, BREAK], [*document, BREAK]]
    for order, source in enumerate(sources):
        for end in range(1, len(source)):
            beginning, length = source[:end], 0
            while (
                length < min(len(beginning), len(text))
                and beginning[-1 - length :] == text[-1 - length :]
            ):
                length += 1
            if source[end] != BREAK and (length, -order, end) > (*best[:2], best[2][0]):
                best = (length, -order, [end, *source[end : end + 6]])
    if not best[0]:
        assert proposal.tokens == []
        return
    expected = [token for token in best[2][1:] if token != BREAK]
    size = min(len(proposal.tokens), len(expected))
    assert size
    assert proposal.tokens[:size] == expected[:size]
    assert proposal.place == ("text", "prediction", "history", "document")[-best[1]]
    assert len(proposal.survival) == len(proposal.tokens)


def test_survival_is_learnt_from_proposals_that_were_not_drafted() -> None:
    shared = SharedPlaces()
    lookup, text = Lookup(shared), [1, 2, 3, 1, 2, 3]
    first = lookup.propose(text, 3)
    assert first.tokens[0] == 1
    for number in range(40):  # the text goes on differently every time
        text += [10 + number, 1, 2, 3]
        last = lookup.propose(text, 3)
    assert last.survival[0] < first.survival[0] / 2
    assert last.survival == sorted(last.survival, reverse=True)


def test_lookups_of_several_threads_share_indexes_that_stay_right() -> None:
    """Threads that index one history at once do not break its automaton."""
    shared, errors = SharedPlaces(history=20_000), list[BaseException]()
    interval = sys.getswitchinterval()

    def requests(seed: int) -> None:
        random = Random(seed)
        try:
            for _ in range(12):
                lookup = Lookup(shared)
                tokens = [random.randrange(4) for _ in range(40)]
                for _ in range(30):
                    tokens += lookup.propose(tokens, 4).tokens[:2] or [1]
                lookup.end(tokens, 8)
        except BaseException as error:
            errors.append(error)

    sys.setswitchinterval(1e-6)
    try:
        threads = [Thread(target=requests, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors
    for generation in shared.history.generations:
        while not generation.complete:
            generation.catch_up()
        fresh = SuffixAutomaton()
        for token in generation.tokens:
            fresh.append(token)
        index = generation.automaton
        assert index.tokens == fresh.tokens
        assert (index._length, index._link) == (fresh._length, fresh._link)

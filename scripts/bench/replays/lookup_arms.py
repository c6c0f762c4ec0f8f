"""Lookups that are compared on recorded answers: ours, and those of other engines.

An arm sees only tokens: it proposes some, and then receives those that follow.
"""

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any
from unittest.mock import patch

from bench.replays.sessions import Turn
from mlx_speculation.engine.draft_length.base import Feedback
from mlx_speculation.engine.draft_length.costs import RoundCosts, Source
from mlx_speculation.engine.draft_length.rule import Credit, DraftRule
from mlx_speculation.engine.lookup.automaton import SuffixAutomaton
from mlx_speculation.engine.lookup.lookup import Lookup, SharedPlaces

LONGEST = 16  # tokens of a draft
# Of suffix decoding: the largest number of tokens of a substring in its trees, and the
# probability below which a draft ends.
DEPTH, LEAST_CHANCE = 64, 0.1


class Arm:
    """Proposes tokens that may follow a text."""

    def begin(self, tokens: Sequence[int], prediction: Sequence[int]) -> None:
        """Begin with a prompt."""

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Return at most `limit` tokens that may follow."""
        return []

    def note(self, drafted: int, accepted: int) -> None:
        """Learn from the result of a round."""

    def end(self, tokens: Sequence[int], answer: int) -> None:
        """End a request whose answer is `tokens[answer:]`."""


@dataclass
class Tally:
    """Counts of a replay."""

    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: list[float] = field(default_factory=list)  # of each proposal

    def speed(self, cost: float) -> float:
        """Return tokens per plain step's time; a drafted token costs `cost` of it."""
        return self.tokens / (self.rounds + cost * self.drafted)


def replay(arm: Arm, turns: Sequence[Turn], tally: Tally) -> None:
    """Generate the answers of a session's turns."""
    for turn in turns:
        known = list(turn.tokens[: turn.answer])
        arm.begin(known, turn.prediction)
        while (left := len(turn.tokens) - len(known)) > 0:
            started = time.process_time()
            result = arm.propose(known, left - 1)
            tally.seconds.append(time.process_time() - started)
            after = turn.tokens[len(known) :]
            agree = [a == b for a, b in zip(result, after, strict=False)]
            accepted = [*agree, False].index(False)
            known += after[: accepted + 1]
            arm.note(len(result), accepted)
            tally.rounds += 1
            tally.drafted += len(result)
            tally.accepted += accepted
            tally.tokens += accepted + 1
        arm.end(known, turn.answer)


class Ours(Arm):
    """Our lookup and draft length rule; a drafted token costs `cost` plain steps."""

    def __init__(self, cost: float, history: int) -> None:
        self._shared = SharedPlaces(history=history)
        known = {0: 1.0, LONGEST: 1.0 + cost * LONGEST}
        self._source = Source(RoundCosts({0: known}), free=True)
        self._credits = Credit(), Credit()  # without and with a prediction
        self._cost = cost

    def begin(self, tokens: Sequence[int], prediction: Sequence[int]) -> None:
        """Index the prompt."""
        self._lookup = Lookup(self._shared, prediction)
        while not self._lookup.read_ahead(tokens):
            pass
        credit = self._credits[bool(prediction)]
        self._rule = DraftRule([self._source], credit, LONGEST)
        self._rule.choose(1, 1, ())  # skip the plain step that the rule begins with

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Return as many tokens as the rule drafts."""
        result = self._lookup.propose(tokens, LONGEST)
        plan = self._rule.choose(1, limit, [[result.survival]])
        self._plan = plan
        return result.tokens[: plan.length]

    def end(self, tokens: Sequence[int], answer: int) -> None:
        """Keep the answer for later requests."""
        self._lookup.end(tokens, answer)

    def note(self, drafted: int, accepted: int) -> None:
        """Tell the rule the result of the round."""
        seconds = 1.0 + self._cost * drafted
        feedback = Feedback(drafted, accepted, seconds, not drafted, not drafted)
        self._rule.learn(1, self._plan, feedback)


def draft_calls(sessions: Sequence[Sequence[Turn]], cost: float, history: int) -> str:
    """Describe how many states `propose` walks, and how many tokens it copies."""
    now = [0, 0]
    calls: list[tuple[int, int]] = []

    class Links(array):  # type: ignore[type-arg]
        def __getitem__(self, state: Any) -> Any:
            now[0] += 1
            return super().__getitem__(state)

    begin, copy = SuffixAutomaton.__init__, SuffixAutomaton.continuation

    def begin_counted(self: Any, **options: Any) -> None:
        begin(self, **options)
        self._link = Links("i", self._link)

    def copy_counted(self: Any, state: int, count: int) -> list[int]:
        result = copy(self, state, count)
        now[1] += len(result)
        return result

    class Counted(Ours):
        def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
            now[:] = 0, 0
            result = super().propose(tokens, limit)
            calls.append((now[0], now[1]))
            return result

    with (
        patch.object(SuffixAutomaton, "__init__", begin_counted),
        patch.object(SuffixAutomaton, "continuation", copy_counted),
    ):
        arm = Counted(cost, history)
        for turns in sessions:
            replay(arm, turns, Tally())
    walked, copied = zip(*calls, strict=True)
    return (
        f"{mean(walked):.1f} states walked (at most {max(walked)}), "
        f"{mean(copied):.1f} tokens copied (at most {max(copied)})"
    )


class PromptLookup(Arm):
    """Proposes the tokens after an earlier occurrence of the n-gram that ends the text.

    Longer n-grams are tried first. With `latest` the latest occurrence is taken, as in
    vLLM, else the first, as in transformers.
    """

    def __init__(self, shortest: int, longest: int, *, latest: bool) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._latest = latest

    def begin(self, tokens: Sequence[int], prediction: Sequence[int]) -> None:
        """Forget the previous text."""
        self._ends: dict[tuple[int, ...], int] = {}
        self._known = 0

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Copy the tokens after the occurrence, up to the end of the text."""
        for end in range(max(1, self._known), len(tokens)):
            for length in self._lengths:
                if length <= end:
                    gram = tuple(tokens[end - length : end])
                    if self._latest or gram not in self._ends:
                        self._ends[gram] = end
        self._known = len(tokens)
        for length in self._lengths:
            result = self._ends.get(tuple(tokens[-length:]))
            if result is not None:
                return list(tokens[result : result + min(limit, LONGEST)])
        return []


class SuffixTree:
    """Counts of all substrings, in a suffix automaton."""

    def __init__(self) -> None:
        self._length, self._link, self._count = [0], [-1], [0]
        self._next: list[dict[int, int]] = [{}]
        self._last = 0
        self.state, self.matched = 0, 0  # the match of the followed text

    def append(self, token: int) -> None:
        """Append a token, and count the substrings that end with it.

        A negative token ends a text.
        """
        link, count = self._link, self._count
        new, state = self._add(self._length[self._last] + 1, {}), self._last
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = link[state]
        if state < 0:
            link[new] = 0
        elif self._length[other := self._next[state][token]] == self._length[state] + 1:
            link[new] = other
        else:
            clone = self._add(self._length[state] + 1, dict(self._next[other]))
            link[clone], count[clone] = link[other], count[other]
            while state >= 0 and self._next[state].get(token) == other:
                self._next[state][token] = clone
                state = link[state]
            link[other] = link[new] = clone
        self._last = state = new
        while state > 0:
            count[state] += 1
            state = link[state]

    def _add(self, length: int, counts: dict[int, int]) -> int:
        self._length.append(length)
        self._link.append(0)
        self._count.append(0)
        self._next.append(counts)
        return len(self._length) - 1

    def follow_own(self) -> None:
        """Match the end of the indexed text with its earlier occurrences."""
        self.state = self._link[self._last]
        self.matched = self._length[self.state]

    def follow(self, tokens: Sequence[int]) -> None:
        """Match the end of another text, given its last tokens."""
        state = matched = 0
        for token in tokens:
            while state and token not in self._next[state]:
                state = self._link[state]
                matched = self._length[state]
            if token in self._next[state]:
                state, matched = self._next[state][token], matched + 1
        self.state, self.matched = state, matched

    def propose(self, limit: int) -> tuple[float, list[int]]:
        """Return the highest score of all matches, and the draft that has it."""
        best: tuple[float, list[int]] = 0.0, []
        state, matched = self.state, min(self.matched, DEPTH)
        while state > 0:
            shorter = self._length[self._link[state]]
            path = self._path(state, limit)
            # All matches of a state have the same continuation. A match with its draft
            # has at most `DEPTH` tokens, so a shorter match can allow a longer draft.
            for length in {matched, max(shorter + 1, min(matched, DEPTH - limit))}:
                count = min(length, DEPTH - length)
                score = sum(chance for _, chance in path[:count])
                if length <= matched and score > best[0]:
                    best = score, [token for token, _ in path[:count]]
            state, matched = self._link[state], min(shorter, DEPTH)
        return best

    def _path(self, state: int, limit: int) -> list[tuple[int, float]]:
        """Return the most frequent tokens, until their path is too improbable."""
        result: list[tuple[int, float]] = []
        chance = 1.0
        while len(result) < limit:
            children = (pair for pair in self._next[state].items() if pair[0] >= 0)
            token, child = max(
                children, key=lambda pair: self._count[pair[1]], default=(-1, 0)
            )
            chance *= self._count[child] / max(1, self._count[state])
            if token < 0 or chance < LEAST_CHANCE:
                break
            result.append((token, chance))
            state = child
        return result


class SuffixDecoding(Arm):
    """Suffix decoding (Oliaro et al., 2024) by its published rule and defaults.

    One tree holds the request's text, another holds all answers. Each match gives the
    path of the most frequent tokens, at most as long as the match. The path with the
    highest sum of probabilities is drafted.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._answers = SuffixTree()
        self._tree, self._known = SuffixTree(), list[int]()

    def begin(self, tokens: Sequence[int], prediction: Sequence[int]) -> None:
        """Make the tree of the text, or extend that of the previous turn."""
        if self._known != tokens[: len(self._known)]:
            self._tree, self._known = SuffixTree(), []
        self._grow(self._tree, tokens[len(self._known) :])
        self._known = list(tokens)

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Return the better proposal of the two trees."""
        new = tokens[len(self._known) :]
        self._grow(self._tree, new)
        self._grow(self._answers, new)
        self._known += new
        self._tree.follow_own()
        self._answers.follow(tokens[-DEPTH:])
        mine = self._tree.propose(self._limit)
        answers = self._answers.propose(self._limit)
        return (mine if mine[0] >= answers[0] else answers)[1][:limit]

    def end(self, tokens: Sequence[int], answer: int) -> None:
        """Add the rest of the answer to the trees, and end the answer."""
        self.propose(tokens, 0)
        self._answers.append(-1)

    def _grow(self, tree: SuffixTree, tokens: Sequence[int]) -> None:
        for token in tokens:
            tree.append(token)

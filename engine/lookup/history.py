"""Answers of earlier requests, and indexes of texts that a later turn may continue."""

from array import array
from collections.abc import Sequence

from mlx_speculation.engine.lookup.automaton import BREAK
from mlx_speculation.engine.lookup.places import GrowingIndex

# The number of tokens before an answer to keep, so that its first token has a match.
BEFORE = 8


class AnswerHistory:
    """Keeps answers, each with a few tokens before it, and drops the oldest.

    Prompts are not kept: an agent's prompt repeats most of the agent's last prompt.

    Answers are in two generations, each of at most half the limit. When the young
    generation is full, it replaces the old one, which is dropped. Thus at least half of
    the limit is kept, and no token is indexed twice.

    Args:
        limit: the largest number of tokens to keep, with a `BREAK` for each answer.

    Attributes:
        generations: the young generation and the old one.
    """

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self.generations = GrowingIndex(array("i")), GrowingIndex(array("i"))

    def add(self, tokens: Sequence[int], answer: int) -> None:
        """Keep an answer, `tokens[answer:]`, or the last tokens of a long one.

        Requests index it later, in chunks.
        """
        if self._half < 2 or answer >= len(tokens):
            return  # there is no room, or no answer
        document = array("i", [*tokens[max(0, answer - BEFORE) :], BREAK])
        document = document[-self._half :]
        young, _ = self.generations
        if len(young.tokens) + len(document) > self._half:
            self.generations = GrowingIndex(document), young
        else:
            young.tokens += document


class TextPool:
    """Indexes of finished texts, for a later turn that continues one of them.

    Args:
        limit: the largest total number of indexed tokens; the oldest texts are dropped.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._indexes: list[GrowingIndex] = []  # the newest index first

    def take(self, tokens: Sequence[int]) -> GrowingIndex:
        """Take the index of the longest text with which these tokens begin.

        Returns:
            The index, removed from the pool; an empty index if no text fits.
        """
        result = GrowingIndex()
        for index in self._indexes:
            kept = index.automaton.tokens
            longer = len(kept) > len(result.automaton.tokens)
            if longer and _begins(tokens, kept):
                result = index
        self._indexes = [index for index in self._indexes if index is not result]
        return result

    def give(self, index: GrowingIndex) -> None:
        """Keep the index of a finished text."""
        kept, size = [], 0
        for each in (index, *self._indexes):
            size += len(each.automaton.tokens)
            if size <= self._limit:
                kept.append(each)
        self._indexes = kept


def _begins(tokens: Sequence[int], kept: "array[int]") -> bool:
    """Return whether `tokens` begin with `kept`; compare the end of `kept` first."""
    size, near = len(kept), max(0, len(kept) - 64)
    if not 0 < size <= len(tokens) or array("i", tokens[near:size]) != kept[near:]:
        return False
    return array("i", tokens[:near]) == kept[:near]

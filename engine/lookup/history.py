"""The answers of earlier requests, and the indexes of texts that turns go on with."""

from array import array
from collections.abc import Sequence

from mlx_speculation.engine.lookup.automaton import BREAK
from mlx_speculation.engine.lookup.places import GrowingIndex

# Tokens before an answer that are kept with it, so that its first ones are found.
BEFORE = 8


class AnswerHistory:
    """Holds answers, each with a few tokens before it, and forgets the oldest.

    A prompt is not held: of an agent's it repeats most of the last one, system prompt
    and all. There are two generations, each of half the limit: when the young one is
    full it becomes the old one, and the old one is dropped. So between half and all of
    the limit is known, and nothing is indexed twice.

    Args:
        limit: how many tokens are held at most, one more for each answer counted.

    Attributes:
        generations: the younger answers first.
    """

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self.generations = GrowingIndex(array("i")), GrowingIndex(array("i"))

    def add(self, tokens: Sequence[int], answer: int) -> None:
        """Hold an answer, `tokens[answer:]`; of one that is too long the last tokens.

        It is indexed later, chunk by chunk.
        """
        if self._half < 2 or answer >= len(tokens):
            return  # nothing could follow anything
        document = array("i", [*tokens[max(0, answer - BEFORE) :], BREAK])
        document = document[-self._half :]
        young, _ = self.generations
        if len(young.tokens) + len(document) > self._half:
            self.generations = GrowingIndex(document), young
        else:
            young.tokens += document


class TextPool:
    """Indexes of finished texts, for the turn that goes on with one.

    Args:
        limit: how many tokens they have at most in all, the oldest dropped.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._indexes: list[GrowingIndex] = []  # the youngest first

    def take(self, tokens: Sequence[int]) -> GrowingIndex:
        """Return the index of the longest text that these tokens begin with.

        It is an empty one where there is none.
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
        """Keep the index of a text that has ended."""
        kept, size = [], 0
        for each in (index, *self._indexes):
            size += len(each.automaton.tokens)
            if size <= self._limit:
                kept.append(each)
        self._indexes = kept


def _begins(tokens: Sequence[int], kept: "array[int]") -> bool:
    """Return whether tokens begin with others; most differ near the end of those."""
    size = len(kept)
    if not size or size > len(tokens) or tokens[size - 1] != kept[-1]:
        return False
    near = max(0, size - 64)
    if array("i", tokens[near:size]) != kept[near:]:
        return False
    return array("i", tokens[:near]) == kept[:near]

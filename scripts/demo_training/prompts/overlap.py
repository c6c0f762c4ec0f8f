"""Refuses prompts that share words in a row with the questions of a benchmark.

A question that is shorter than that is compared as a whole.
"""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

WORDS = 8


def words_of(text: str) -> list[str]:
    """Return the words of a text in small letters, without punctuation."""
    return re.findall(r"\w+", text.lower())


def read_questions(file: Path) -> list[str]:
    """Return all turns in a file of questions, JSON Lines with "turns"."""
    lines = file.read_text("utf-8").splitlines()
    return [turn for line in lines if line for turn in json.loads(line)["turns"]]


class Overlap:
    """Knows the questions of a benchmark.

    Args:
        questions: their texts.
        words: how many in a row are an overlap.
    """

    def __init__(self, questions: Iterable[str], words: int = WORDS) -> None:
        self._words = words
        self._rows: set[tuple[str, ...]] = set()
        self._short: set[tuple[str, ...]] = set()
        for question in questions:
            found = words_of(question)
            if len(found) < words:
                self._short.add(tuple(found))
            self._rows.update(self._in_a_row(found))

    def _in_a_row(self, found: Sequence[str]) -> Iterable[tuple[str, ...]]:
        last = len(found) - self._words
        return (tuple(found[at : at + self._words]) for at in range(last + 1))

    def finds(self, turns: Iterable[str]) -> bool:
        """Whether one of the turns overlaps with a question."""
        for turn in turns:
            found = words_of(turn)
            if tuple(found) in self._short:
                return True
            if any(row in self._rows for row in self._in_a_row(found)):
                return True
        return False

"""Prompts of benchmarks: the bundled ones, and question files in Spec-Bench's layout.

A question file has one JSON object a line: `question_id`, `category`, `turns` (the
messages of a user) and perhaps `group`. Without `group` the category is the group; the
eight categories of MT-Bench are one group, as in Spec-Bench's own tables.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_speculation.demo import demo_prompts

MT_BENCH = {
    *("writing", "roleplay", "reasoning", "math"),
    *("coding", "extraction", "stem", "humanities"),
}


@dataclass(frozen=True, slots=True)
class Question:
    """A question of one or more turns."""

    group: str
    source: str
    turns: tuple[str, ...]  # messages of a user, or a text to continue
    chat: bool = True  # turns go through the chat template, if there is one

    def prompt(self, tokenizer: Any, answers: Sequence[str] = ()) -> list[int]:
        """Return a turn's prompt as token ids, given the answers to earlier turns."""
        said = self.turns[: len(answers) + 1]
        if not (self.chat and tokenizer.has_chat_template):
            parts = [part for pair in zip(said, answers, strict=False) for part in pair]
            text = "\n\n".join([*parts, said[-1]])
            return [int(token) for token in tokenizer.encode(text)]
        messages = [{"role": "user", "content": said[0]}]
        for answer, turn in zip(answers, said[1:], strict=True):
            messages.append({"role": "assistant", "content": answer})
            messages.append({"role": "user", "content": turn})
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return [int(token) for token in ids]


def bundled(groups: Sequence[str] | None, count: int) -> dict[str, list[Question]]:
    """Return the first `count` bundled prompts of each of `groups`; None: of all."""
    result = [
        Question(each.group, each.source, (each.text,), chat=False)
        for each in demo_prompts()
    ]
    return _grouped(result, groups, count)


def read_questions(
    path: Path, groups: Sequence[str] | None, count: int
) -> dict[str, list[Question]]:
    """Return a file's first `count` questions of each of `groups`; None: of all.

    Raises:
        ValueError: a line is no question, or a group has none.
    """
    result = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
        if line.strip():
            result.append(_question(line, f"{path.name}, line {number}"))
    return _grouped(result, groups, count)


def _question(line: str, where: str) -> Question:
    try:
        row = json.loads(line)
        category, turns = row["category"], row["turns"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{where} is no question: {type(error).__name__}: {error}. A JSON object "
            "with question_id, category and turns is needed."
        ) from error
    if not (isinstance(turns, list) and turns and all(map(_is_text, turns))):
        raise ValueError(f"{where}: turns is {turns!r}, and a list of texts is needed")
    group = row.get("group") or ("mt_bench" if category in MT_BENCH else category)
    return Question(group, str(row.get("question_id", where)), tuple(turns))


def _is_text(turn: Any) -> bool:
    return isinstance(turn, str) and bool(turn.strip())


def _grouped(
    questions: Sequence[Question], groups: Sequence[str] | None, count: int
) -> dict[str, list[Question]]:
    result: dict[str, list[Question]] = defaultdict(list)
    for question in questions:
        if len(result[question.group]) < count:
            result[question.group].append(question)
    if missing := set(groups or ()) - result.keys():
        raise ValueError(
            f"there is no group {min(missing)!r}; the groups are {', '.join(result)}"
        )
    return {group: result[group] for group in groups or result}

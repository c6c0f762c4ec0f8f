"""Prompts in a file of JSON Lines, each as the messages of a chat.

{"messages": [{"role": "user", "content": "..."}, ...]}   answers are ignored
{"turns": ["...", "..."]}                                 user messages in order
{"prompt": "..."} or {"text": "..."} or "..."             one user message
"""

from pathlib import Path
from typing import Any

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.json_files import JsonFlawError, parse_json

Messages = list[dict[str, str]]
_LONGEST = 1 << 20  # the maximum number of characters of a line


def read_prompts(file: Path) -> list[Messages]:
    """Return the prompts of a file: system and user messages, in order.

    Raises:
        InvalidRequestError: the file cannot be read, has a bad line, or is empty.
    """
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(
            f"The prompts in {str(file)!r} cannot be read: {error}. A file of JSON "
            "Lines is needed."
        ) from error
    result = [
        _messages(line, f"Line {number} of {str(file)!r}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not result:
        raise InvalidRequestError(
            f"{str(file)!r} has 0 prompts, and at least 1 is needed. Write one JSON "
            'object a line, such as {"prompt": "Explain recursion."}.'
        )
    return result


def _messages(line: str, where: str) -> Messages:
    try:
        value = parse_json(line) if len(line) <= _LONGEST else None
    except JsonFlawError as error:
        raise InvalidRequestError(f"{where} {error}.") from error
    if isinstance(value, dict):
        known = (value.get(key) for key in ("messages", "turns", "prompt", "text"))
        value = next((each for each in known if each is not None), None)
    turns = [value] if isinstance(value, str) else value
    if isinstance(turns, list):
        made = [_message(turn) for turn in turns]
        kept = [each for each in made if each and each["role"] != "assistant"]
        if None not in made and any(each["role"] == "user" for each in kept):
            return kept
    raise InvalidRequestError(
        f"{where} is no prompt. It must be a string, or an object with 'messages', "
        "'turns', 'prompt' or 'text' that holds a user's message."
    )


def _message(turn: Any) -> dict[str, str] | None:
    """Return a turn as a message; None: it is not a message."""
    if isinstance(turn, str):
        return {"role": "user", "content": turn} if turn.strip() else None
    if not isinstance(turn, dict):
        return None
    role, content = turn.get("role"), turn.get("content")
    if not isinstance(role, str) or not isinstance(content, str):
        return None
    return {"role": role, "content": content}

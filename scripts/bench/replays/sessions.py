"""Requests of recorded sessions and edits, as tokens, for replays without a model."""

import difflib
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from gzip import open as open_gzip
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

# Two releases of each package; an edit is a file with 2 to 20 % of its lines changed.
RELEASES = {
    "httpx": ("0.27.2", "0.28.1"),
    "rich": ("13.7.1", "13.9.4"),
    "attrs": ("23.2.0", "24.2.0"),
}
LEAST_CHANGED, MOST_CHANGED = 0.02, 0.20


@dataclass(frozen=True)
class Turn:
    """A request and its recorded answer."""

    tokens: Sequence[int]  # prompt and answer
    answer: int  # index of the answer's first token
    prediction: Sequence[int] = ()  # passed as the expected answer


def said(message: dict[str, Any]) -> str:
    """Return a message's text, with tool calls in the form that models write."""
    calls = (json.dumps(call) for call in message.get("tool_calls") or ())
    wrapped = "".join(f"<tool_call>{call}</tool_call>" for call in calls)
    return (message.get("content") or "") + wrapped


def turns_of(messages: Sequence[dict[str, Any]], tokenizer: Any) -> list[Turn]:
    """Return a request for each message of the assistant.

    An answer ends with the token that ends a message.
    """
    chat = [{"role": one["role"], "content": said(one)} for one in messages]
    result: list[Turn] = []
    known: list[int] = []
    for number, message in enumerate(chat):
        if message["role"] != "assistant":
            continue
        prompt = _ids(chat[:number], tokenizer, add_generation_prompt=True)
        whole = _ids(chat[: number + 1], tokenizer)
        if prompt[: len(known)] != known or whole[: len(prompt)] != prompt:
            raise ValueError("the chat template changes the tokens of earlier messages")
        stop = whole.index(tokenizer.eos_token_id, len(prompt)) + 1
        known = whole[:stop]
        result.append(Turn(known, len(prompt)))
    return result


def _ids(chat: Sequence[dict[str, str]], tokenizer: Any, **more: bool) -> list[int]:
    text = tokenizer.apply_chat_template(chat, tokenize=False, **more)
    return list(tokenizer.encode(text, add_special_tokens=False))


def read_sessions(file: Path, tokenizer: Any) -> list[list[Turn]]:
    """Return the turns of each session of a file of JSON lines with `messages`."""
    opened: Any = open_gzip if file.suffix == ".gz" else open
    with opened(file, "rt", encoding="utf-8") as lines:
        return [turns_of(json.loads(line)["messages"], tokenizer) for line in lines]


def by_turns(sessions: Sequence[list[Turn]], together: int) -> Iterator[list[Turn]]:
    """Merge each group of `together` sessions into one, in which they alternate."""
    for start in range(0, len(sessions), together):
        group = sessions[start : start + together]
        longest = max(len(session) for session in group)
        yield [s[i] for i in range(longest) for s in group if i < len(s)]


def edits(tokenizer: Any, folder: Path | None = None) -> list[Turn]:
    """Return requests to update a file; the old file is the prediction.

    `folder` keeps the wheels; None: a temporary folder. Missing wheels are fetched from
    the package index.
    """
    result = []
    for old, new in _changed(folder):
        ask = f"Bring this file up to date.\n\n{old}"
        chat = [{"role": "user", "content": ask}]
        prompt = _ids(chat, tokenizer, add_generation_prompt=True)
        encode = tokenizer.encode
        answer = [*encode(new, add_special_tokens=False), tokenizer.eos_token_id]
        prediction = encode(old, add_special_tokens=False)
        result.append(Turn([*prompt, *answer], len(prompt), prediction))
    return result


def unrelated(turns: Sequence[Turn]) -> list[Turn]:
    """Return the edits with the prediction of another file.

    Only the last 8 tokens of the prompt are kept, without the old file.
    """
    each = []
    for turn, other in zip(turns, [*turns[1:], *turns[:1]], strict=True):
        start = turn.answer - 8
        each.append(Turn(turn.tokens[start:], 8, other.prediction))
    return each


def _changed(folder: Path | None) -> Iterator[tuple[str, str]]:
    """Yield files that changed a little between two releases, old and new."""
    with TemporaryDirectory() as place:
        wheels = Path(place) if folder is None else folder
        for name, releases in RELEASES.items():
            before, after = (_files(name, each, wheels) for each in releases)
            for path in sorted(before.keys() & after.keys()):
                old, new = before[path], after[path]
                share = changed_share(old.splitlines(), new.splitlines())
                if LEAST_CHANGED <= share <= MOST_CHANGED:
                    yield old, new


def changed_share(old: Sequence[str], new: Sequence[str]) -> float:
    """Return the share of the longer file's lines that the other one lacks."""
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    same = sum(block.size for block in matcher.get_matching_blocks())
    return 1 - same / max(1, len(old), len(new))


def _files(name: str, release: str, wheels: Path) -> dict[str, str]:
    pattern = f"{name}-{release}-*.whl"
    if not list(wheels.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--dest", str(wheels), f"{name}=={release}"]
        subprocess.run(command, check=True)
    with zipfile.ZipFile(next(wheels.glob(pattern))) as wheel:
        names: Iterable[str] = (n for n in wheel.namelist() if n.endswith(".py"))
        return {each: wheel.read(each).decode() for each in names}

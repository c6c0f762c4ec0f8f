"""JSON: reading of untrusted texts within limits, and atomic writing of files."""

import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

DEEPEST = 200  # levels of nesting; Python's parser recurses once per level
LARGEST = 1 << 26  # bytes of a file; the index of 100,000 tensors has about 10 MB

# The search stays linear: an unclosed string matches up to the end of the text.
_STRINGS_AND_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)
_STEPS = {"[": 1, "{": 1, "]": -1, "}": -1}


class JsonFlawError(ValueError):
    """Flaw of a JSON text; the message lacks its subject, as in "is not JSON"."""


def parse_json(
    text: str | bytes,  # bytes are UTF-8
    *,
    unique_keys: bool = False,  # refuse repeated keys; Python would keep the last value
    finite: bool = False,  # refuse NaN and infinity: Python accepts them, JSON does not
    deepest: int = DEEPEST,
) -> Any:
    """Return the value of a JSON text.

    Raises:
        JsonFlawError: the text is not JSON, is nested too deep, or violates an option.
    """
    try:
        text = text if isinstance(text, str) else text.decode("utf-8")
        if deeper_than(deepest, text):
            raise JsonFlawError(f"is nested too deeply: more than {deepest} levels")
        return json.loads(
            text,
            object_pairs_hook=_unique if unique_keys else None,
            parse_constant=_no_constant if finite else None,
        )
    except JsonFlawError:
        raise
    except RecursionError as error:  # the caller has used up most of the stack
        said = "is nested too deeply for the Python stack that is left"
        raise JsonFlawError(said) from error
    except ValueError as error:
        raise JsonFlawError(f"is not JSON ({_short(str(error))})") from error


def load_json(file: Path, *, most: int = LARGEST, unique_keys: bool = False) -> Any:
    """Return the value of a JSON file.

    Raises:
        JsonFlawError: the file is missing, unreadable, not regular or larger than
            `most` bytes, or `parse_json` refuses its text.
    """
    try:
        if not stat.S_ISREG(file.stat().st_mode):  # a pipe could block
            raise JsonFlawError("is a folder or a device, not a regular file")
        with file.open("rb") as opened:
            text = opened.read(most + 1)
    except JsonFlawError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        why = getattr(error, "strerror", None) or error
        raise JsonFlawError(f"cannot be opened ({why})") from error
    if len(text) > most:
        raise JsonFlawError(f"has more than {most} bytes")
    return parse_json(text, unique_keys=unique_keys)


@contextmanager
def replaced(file: Path) -> Iterator[Path]:
    """Yield a temporary path beside a file; what is written there replaces that file.

    After an error an earlier file stays as it was.
    """
    temporary = file.with_name(f".{os.urandom(8).hex()}.tmp{file.suffix}")
    try:
        yield temporary
        temporary.replace(file)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_json(file: Path, value: dict[str, Any]) -> None:
    """Write a file atomically, and make its folder.

    Raises:
        OSError: the file cannot be written; an earlier file stays as it was.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with replaced(file) as temporary, temporary.open("x", encoding="utf-8") as opened:
        opened.write(json.dumps(value, indent=2) + "\n")
        opened.flush()
        os.fsync(opened.fileno())


def deeper_than(levels: int, text: str) -> bool:
    """Return whether a JSON text nests arrays and objects deeper than `levels`."""
    if text.count("[") + text.count("{") <= levels:
        return False
    depth = 0
    for result in _STRINGS_AND_BRACKETS.finditer(text):
        depth += _STEPS.get(result[0], 0)
        if depth > levels:
            return True
    return False


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise JsonFlawError(f"has the key {_short(repr(twice))} twice in one object")
    return result


def _no_constant(name: str) -> None:
    raise JsonFlawError(f"holds {name}, which is not a JSON number")


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."

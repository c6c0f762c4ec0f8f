"""JSON that others wrote: read with limits; and files of our own, written whole or not.

It knows no file format. Whoever reads one says which file it is, and what to do.
"""

import json
import os
import re
import stat
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

# Python's parser calls itself for each level, and its stack is the interpreter's.
DEEPEST = 200
# The index of a model of 100,000 tensors has some 10 MB.
LARGEST = 1 << 26  # bytes

# A string that is not closed goes to the end, so that no character is looked at twice.
_STRINGS_AND_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)
_STEPS = {"[": 1, "{": 1, "]": -1, "}": -1}


class JsonFlawError(ValueError):
    """Refusal of JSON: a text to put after "it" or a name, without a full stop."""


def parse_json(
    text: str | bytes,  # as characters, or as UTF-8
    *,
    # Refuse an object with a key twice, of which the last one would count
    unique_keys: bool = False,
    finite: bool = False,  # refuse NaN and infinity, which Python reads and JSON lacks
    deepest: int = DEEPEST,  # how many levels of arrays and objects there may be
) -> Any:
    """Return what a JSON text says.

    Raises:
        JsonFlawError: it is not JSON, or nested too deep, or refused by an option.
    """
    try:
        text = text if isinstance(text, str) else text.decode("utf-8")
        if deeper_than(deepest, text):
            raise JsonFlawError(
                f"is nested too deep to be read, more than {deepest} levels"
            )
        return json.loads(
            text,
            object_pairs_hook=_unique if unique_keys else None,
            parse_constant=_no_constant if finite else None,
        )
    except JsonFlawError:
        raise
    except RecursionError as error:  # of a caller that is nested deep itself
        raise JsonFlawError("is nested too deep to be read from here") from error
    except ValueError as error:
        raise JsonFlawError(f"is not JSON ({_short(str(error))})") from error


def load_json(file: Path, *, most: int = LARGEST, unique_keys: bool = False) -> Any:
    """Return what a JSON file says.

    Args:
        file: a regular file, so that reading cannot wait for ever.
        most: how many bytes it may have.
        unique_keys: see `parse_json`.

    Raises:
        JsonFlawError: it is missing, cannot be read or is too large, or `parse_json`
            refuses what it holds.
    """
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise JsonFlawError("is a folder or a device, and a file is needed")
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


def write_json(file: Path, value: dict[str, Any]) -> None:
    """Write a file as a whole, and make its folder.

    Raises:
        OSError: it cannot be written; everything is as it was.
    """
    temporary = file.with_name(f".{file.name}.{os.urandom(8).hex()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("x", encoding="utf-8") as opened:
            opened.write(json.dumps(value, indent=2) + "\n")
            opened.flush()
            os.fsync(opened.fileno())
        temporary.replace(file)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def deeper_than(levels: int, text: str) -> bool:
    """Return whether arrays and objects in a JSON text are nested deeper than that."""
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
    raise JsonFlawError(f"holds {name}, which is no number of JSON")


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."

"""Files that commands read and write, such as prompts and images, but not models.

An unusable file raises an `InvalidRequestError` that names the option. A failed write
raises a `SpeculationError`.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from mlx_speculation.errors import InvalidRequestError, SpeculationError
from mlx_speculation.json_files import JsonFlawError, parse_json, replaced


def read_prompt(prompt: str | None) -> str:
    """Return a prompt; None or "-": read it from standard input."""
    if prompt is None and sys.stdin.isatty():
        raise InvalidRequestError(
            "There is no prompt. Give --prompt, or a text on standard input."
        )
    if prompt is None or prompt == "-":
        prompt = decoded("Standard input", sys.stdin.buffer.read())
    text = sound_text("The prompt", prompt)
    if not text:
        raise InvalidRequestError(
            "The prompt is empty, and at least one character is needed. Give --prompt "
            "a text, or pipe one in."
        )
    return text


def sound_text(name: str, text: str) -> str:
    """Return a text of the command line without surrogates, or refuse it.

    In a locale without UTF-8, Python reads non-ASCII bytes as surrogates.
    """
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError as error:
        start = next(i for i, one in enumerate(text) if "\ud800" <= one <= "\udfff")
        raise InvalidRequestError(
            f"{name} is not UTF-8: byte 0x{ord(text[start]) & 0xFF:02x} stands at "
            f"character {start}. Convert it, for example with iconv."
        ) from error


def check_length(tokens: int, longest: int | None) -> None:
    """Refuse a prompt of more than `longest` tokens; None: there is no limit."""
    if longest is not None and tokens > longest:
        raise InvalidRequestError(
            f"The prompt has {tokens} tokens, and the limit is {longest}, by default "
            "what the model was made for. Shorten the prompt, or allow more with "
            "--max-model-len."
        )


def decoded(name: str, content: bytes) -> str:
    """Return UTF-8 bytes as text."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"{name} is not UTF-8: byte 0x{content[error.start]:02x} stands at "
            f"offset {error.start}. Convert it, for example with iconv."
        ) from error


def read_json_file(option: str, path: Path) -> Any:
    """Return the value of a JSON file."""
    check_input(option, path)
    content = path.read_bytes()
    return parsed_json(f"{option} {str(path)!r}", decoded(f"{str(path)!r}", content))


def read_prompts(option: str, path: Path) -> list[str]:
    """Return the prompts of a file of JSON lines, such as those of Spec-Bench.

    A line is a string, or an object with a "prompt" or a list of "turns", of which the
    first is taken.
    """
    check_input(option, path)
    lines = decoded(f"{option} {str(path)!r}", path.read_bytes()).splitlines()
    result = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        value = parsed_json(f"Line {number} of {option} {str(path)!r}", line)
        if isinstance(value, dict):
            turns = value.get("turns")
            first = turns[0] if isinstance(turns, list) and turns else None
            value = value.get("prompt", first)
        if not isinstance(value, str) or not value:
            raise InvalidRequestError(
                f"Line {number} of {option} {str(path)!r} holds no prompt. It needs a "
                "text under 'prompt', or a list of texts under 'turns'."
            )
        result.append(value)
    if not result:
        raise InvalidRequestError(f"{option} {str(path)!r} holds 0 prompts.")
    return result


def check_input(option: str, path: Path) -> None:
    """Refuse a file that cannot be read."""
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError as error:
        raise InvalidRequestError(
            f"{option} is {str(path)!r}, which cannot be read: {error.strerror}. Name "
            "a file."
        ) from error


def checked_images(paths: Sequence[Path], prefix: str) -> list[Path]:
    """Return the files of a prompt's images.

    Unreadable files are refused, and so is a prefix together with images.
    """
    for path in paths:
        check_input("--image", path)
    if paths and prefix:
        raise InvalidRequestError(
            "--image and --prefill-response are given, but the beginning of an answer "
            "about an image cannot be set. Leave one of them out."
        )
    return list(paths)


def parsed_json(name: str, text: str) -> Any:
    """Return the value of a JSON text."""
    try:
        return parse_json(text)
    except JsonFlawError as error:
        raise InvalidRequestError(
            f"{name} {error}. Correct it; python -m json.tool shows where."
        ) from error


def json_object(option: str, text: str) -> dict[str, Any]:
    """Return the object of an option, or refuse another value."""
    value = parsed_json(option, text)
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{option} is {text}, and a JSON object is needed.")
    return value


def check_output(
    option: str, path: Path, advice: str = "Name a file in a folder of yours."
) -> None:
    """Refuse a file that could not be written."""
    folder, why = path.absolute().parent, ""
    try:
        if path.is_dir():
            why = "which is a folder"
        elif not folder.is_dir():
            why = f"and there is no folder {str(folder)!r}"
        elif not os.access(path if path.exists() else folder, os.W_OK):
            why = "and this user has no permission to write it"
    except OSError as error:
        why = f"which cannot be written: {error.strerror}"
    if why:
        raise InvalidRequestError(f"{option} is {str(path)!r}, {why}. {advice}")


@contextmanager
def writing(option: str, path: Path) -> Iterator[Path]:
    """Yield a file to write: a temporary one that replaces `path`, or `path` itself."""
    whole = path.resolve()
    regular = whole.is_file() or not whole.exists()  # a device is written directly
    atomic = regular and os.access(whole.parent, os.W_OK)
    try:
        with replaced(whole) if atomic else nullcontext(whole) as part:
            yield part
    except OSError as error:
        raise SpeculationError(
            f"{option} is {str(path)!r}, which cannot be written: {error.strerror}. "
            "Name another file."
        ) from error

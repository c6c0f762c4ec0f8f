"""Prompts about real paragraphs: the documentation of installed Python packages.

A drafter is good on the kinds of requests that it has seen, and small models do not
write long texts to be summarized or translated themselves. So paragraphs out of the
descriptions and docstrings of installed packages are put into templates. Nothing of
them is kept in this repository, and packages without a free licence are left out.

    python scripts/demo_training/prompts/documentation.py prompts.jsonl --count 6000
"""

import argparse
import ast
import json
import random
import re
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

FREE = ("mit", "bsd", "apache", "isc", "python", "psf", "mpl", "zlib", "unlicense")
SHORTEST, LONGEST = 200, 1600  # characters of a paragraph
SHORT = 420  # of one to translate or to rewrite
# Lists of arguments, code, and markup.
NO_PROSE = re.compile(r"^[>|#=*:.\-@]|\b[A-Z]\w+:( |$)|::|__|\(\)|->|`|\w_\w|\\[a-z]")
TEMPLATES: tuple[tuple[int, str], ...] = (
    (3, "Summarize: {text}"),
    (3, "Summarize the following text in two or three sentences:\n\n{text}"),
    (1, "{text}\n\nWrite a short summary of the text above."),
    (2, "Summarize the main points of this text as a list:\n\n{text}"),
    (3, "{text}\n\nAnswer with the help of the text: what is this about?"),
    (
        2,
        "Use the following passages to answer the question.\n\n{text}\n\n{more}\n\n"
        "Question: what does the second passage say?",
    ),
    (2, "Passage 1: {text}\n\nPassage 2: {more}\n\nWhich of these is about {word}?"),
    (2, "Context: {text}\n\nQuestion: what is {word}?\n\nAnswer:"),
    (2, "Translate into French: {short}"),
    (2, "Translate into German:\n{short}"),
    (1, "Translate this to Spanish: {short}"),
    (2, "Rewrite this so that it is easier to read:\n\n{short}"),
    (1, "Rewrite the following text in a friendly tone:\n\n{short}"),
    (1, "Fix the grammar of this text:\n\n{short}"),
    (1, "Extract the most important terms from this text:\n\n{text}"),
    (1, "Explain the following text to a child:\n\n{short}"),
    (1, "Give this text a title:\n\n{text}"),
)


def paragraphs() -> Iterator[str]:
    """Yield the paragraphs of prose of all packages that are free to use."""
    package: Any
    for package in distributions():
        if not is_free(package):
            continue
        yield from prose(package.metadata.get_payload() or "")
        for file in package.files or ():
            if file.suffix == ".py" and "test" not in str(file):
                yield from docstrings(Path(str(file.locate())))


def is_free(package: Any) -> bool:
    """Whether the metadata of a package name a free licence."""
    said = [
        package.metadata.get("License-Expression") or "",
        (package.metadata.get("License") or "")[:80],
        *(package.metadata.get_all("Classifier") or ()),
    ]
    licences = " ".join(s for s in said if "::" not in s or "License" in s).lower()
    return any(name in licences for name in FREE)


def docstrings(file: Path) -> Iterator[str]:
    """Yield the prose in the docstrings of a module."""
    try:
        tree = ast.parse(file.read_text("utf-8"))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield from prose(ast.get_docstring(node) or "")


def prose(text: str) -> Iterator[str]:
    """Yield the paragraphs of a text that read as sentences, without markup."""
    for block in re.split(r"\n\s*\n", text):
        joined = " ".join(block.split())
        letters = sum(c.isalpha() or c == " " for c in joined)
        plain = letters > 0.93 * len(joined) and not NO_PROSE.search(joined)
        if plain and SHORTEST <= len(joined) <= LONGEST and joined.endswith("."):
            yield joined


def prompts(found: list[str], count: int, seed: int) -> Iterator[str]:
    """Yield prompts about paragraphs, templates drawn by their weights."""
    draw = random.Random(seed)
    short = [text for text in found if len(text) <= SHORT]
    weights = [weight for weight, _ in TEMPLATES]
    for _ in range(count):
        template = draw.choices(TEMPLATES, weights)[0][1]
        text = draw.choice(found)
        if draw.random() < 0.3 and len(text) < LONGEST // 2:
            text = f"{text}\n\n{draw.choice(found)}"
        words = re.findall(r"[A-Za-z]{6,}", text)
        yield template.format(
            text=text,
            more=draw.choice(found),
            short=draw.choice(short),
            word=draw.choice(words) if words else "it",
        )


def main() -> None:
    """Write the prompts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    found = sorted(set(paragraphs()))
    with options.file.open("w", encoding="utf-8") as opened:
        for text in prompts(found, options.count, options.seed):
            opened.write(json.dumps({"prompt": text}) + "\n")
    print(f"{options.count} prompts about {len(found)} paragraphs")


if __name__ == "__main__":
    main()

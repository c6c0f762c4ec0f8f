"""Plain words: openings of docstrings, and names that say nothing of the thing."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("engine", "caches", "samplers", "models", "src", "scripts", "tests")
PRODUCT = FOLDERS[:5]
PLAIN = FOLDERS[:6]  # names in tests are still to be changed
RELATIVE = re.compile(r"(What|Which|Whether|How|Who|Whose|Where|When)\b")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
# What is meant has a name: drafters, kept rows, requests, feedback, the next plan.
NAMES = {"found", "own", "held", "asked", "became", "begun", "following"}
# Their plain forms: tolerates_invalid_logits, is_draft, sequential, probed,
# distribution, fix, received.
WORDS = ("indifferent", "guesses", "in_turn", "told", "law", "mend", "heard")
DIALECT = re.compile(rf"(^|_)({'|'.join(WORDS)})(_|$)")
Written = tuple[str, str, str]  # folder, place, text


def relative_openings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the beginning of docstrings that open with a relative word."""
    for node in ast.walk(tree):
        text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
        if text and RELATIVE.match(text):
            yield getattr(node, "lineno", 1), text.partition("\n")[0]


def names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of variables, arguments and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            if isinstance(node.ctx, ast.Store):
                yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def defined(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of functions and classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name


@cache
def written() -> tuple[list[Written], list[Written], list[Written]]:
    """Return all openings, names and definitions; each module is parsed once."""
    openings, stored, definitions = list[Written](), list[Written](), list[Written]()
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for all_of, read in (
                (openings, relative_openings),
                (stored, names),
                (definitions, defined),
            ):
                place = f"{path.relative_to(ROOT)}:"
                all_of += [
                    (folder, f"{place}{line}", text) for line, text in read(tree)
                ]
    return openings, stored, definitions


def test_docstrings_open_with_a_noun_or_a_verb() -> None:
    openings, _, _ = written()
    assert not openings, "a relative opening"


def test_names_say_the_thing() -> None:
    _, stored, _ = written()
    bare = [
        (place, name)
        for folder, place, name in stored
        if folder in PLAIN and name.strip("_") in NAMES
    ]
    assert not bare, "a name that says nothing of the thing"


def test_words_of_the_dialect_are_gone_from_the_product() -> None:
    _, stored, definitions = written()
    used = [
        (place, name)
        for folder, place, name in [*stored, *definitions]
        if folder in PRODUCT and DIALECT.search(name)
    ]
    assert not used, "a word of the dialect"


@pytest.mark.parametrize(
    ("code", "openings", "bare"),
    [
        ('"""What drafts."""\ndef f(own): ...', 1, 1),
        ('"""Batch drafters."""\nheld = 1\nself._found: int = 2', 0, 2),
        ('class A:\n    """Whether it is."""\n    asked: int', 1, 1),
        ('"""Return whether it is."""\nother = held', 0, 0),
    ],
    ids=["opening", "names", "inside", "plain"],
)
def test_a_breach_is_seen(code: str, openings: int, bare: int) -> None:
    tree = ast.parse(code)
    assert len(list(relative_openings(tree))) == openings
    assert sum(name.strip("_") in NAMES for _, name in names(tree)) == bare

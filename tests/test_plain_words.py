"""Rules for the words of source files: docstrings, names, sections of Args."""

import ast
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("engine/", "caches/", "samplers/", "models/", "src/")
PLAIN = (*PRODUCT, "scripts/")
SOURCES = (*PLAIN, "tests/")

RELATIVE = re.compile(r"(What|Which|Whether|How|Who|Whose|Where|When)\b")
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTION)
# Vague names. A better name says what it holds, such as kept_rows or next_plan.
NAMES = {"found", "own", "held", "asked", "became", "begun", "following"}
# Words that no other project uses. Better words, in the order of the pattern:
# tolerates_invalid_logits, is_draft, sequential, probed, distribution, fix, received.
WORDS = re.compile(r"(^|_)(indifferent|guesses|in_turn|told|laws?|mend|heard)(_|$)")
# `behind` means that a plain step was in flight when the round began. These folders
# and modules may use the word:
IN_FLIGHT = (
    *("engine/batch", "engine/draft_length", "engine/round", "engine/timing.py"),
    *("scripts/bench/replays", "tests/engine/batch", "tests/engine/draft_length"),
    *("tests/engine/round", "tests/engine/test_text_distribution.py"),
)
BEHIND = re.compile(r"(^|_)behind(_|$)")
SECTION = re.compile(r"^(?:Args|Attributes):\n((?:[ ]+.*\n|\n)+)", re.MULTILINE)
ENTRY = re.compile(r"(\*{0,2}\w+(?:, \*{0,2}\w+)*):")

Nodes = Sequence[Any]  # a module's nodes that have names or docstrings
Breaches = Iterator[tuple[int, str]]  # (line, text of the breach)


def nodes_of(tree: ast.AST) -> Nodes:
    kinds = (*DOCUMENTED, ast.Name, ast.Attribute, ast.arg)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def relative_openings(nodes: Nodes) -> Breaches:
    for node in nodes:
        text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
        if text and RELATIVE.match(text):
            yield getattr(node, "lineno", 1), text.partition("\n")[0]


def names(nodes: Nodes) -> Breaches:
    for node in nodes:
        if isinstance(node, (ast.Name, ast.Attribute)):
            if isinstance(node.ctx, ast.Store):
                yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def defined(nodes: Nodes) -> Breaches:
    for node in nodes:
        if isinstance(node, (ast.ClassDef, *FUNCTION)):
            yield node.lineno, node.name


def bare_names(nodes: Nodes) -> Breaches:
    return ((line, name) for line, name in names(nodes) if name.strip("_") in NAMES)


def dialect(nodes: Nodes) -> Breaches:
    return ((line, name) for line, name in names(nodes) if WORDS.search(name))


def dialect_defined(nodes: Nodes) -> Breaches:
    return ((line, name) for line, name in defined(nodes) if WORDS.search(name))


def words_of_order(nodes: Nodes) -> Breaches:
    every = [*names(nodes), *defined(nodes)]
    return ((line, name) for line, name in every if BEHIND.search(name))


def entries(doc: str) -> Iterator[str]:
    """Yield the names that a docstring lists under arguments and attributes."""
    for section in SECTION.finditer(doc + "\n"):
        for line in textwrap.dedent(section[1]).splitlines():
            if entry := ENTRY.match(line):
                yield from (name.strip("*") for name in entry[1].split(", "))


def members(node: ast.ClassDef) -> set[str]:
    """Return the fields, methods, attributes and constructor arguments of a class."""
    result = set()
    for part in node.body:
        if isinstance(part, (ast.AnnAssign, ast.Assign)):
            targets = part.targets if isinstance(part, ast.Assign) else [part.target]
            result |= {ast.unparse(target) for target in targets}
        elif isinstance(part, FUNCTION):
            result |= {part.name, *(name.arg for name in arguments(part))}
            result |= {name for _, name in names(nodes_of(part))}
    return result


def arguments(node: Any) -> list[ast.arg]:
    return [name for name in ast.walk(node.args) if isinstance(name, ast.arg)]


def stale_entries(nodes: Nodes) -> Breaches:
    """Yield the arguments and attributes that a docstring lists and the code lacks."""
    for node in nodes:
        if not isinstance(node, (ast.ClassDef, *FUNCTION)):
            continue
        if isinstance(node, ast.ClassDef):
            known = members(node)
        else:
            known = {name.arg for name in arguments(node)}
        for name in entries(ast.get_docstring(node) or ""):
            if name not in known:
                yield node.lineno, f"{node.name}: {name}"


@dataclass(frozen=True)
class Rule:
    says: str
    breaches: Callable[[Nodes], Breaches]
    folders: tuple[str, ...]
    but: tuple[str, ...] = ()  # prefixes of exempt paths


RULES = {
    "openings": Rule(
        "A docstring opens with a noun or a verb", relative_openings, SOURCES
    ),
    "bare names": Rule("A name says what it holds", bare_names, SOURCES),
    "dialect": Rule("No variable has a word of WORDS", dialect, SOURCES),
    "dialect, defined": Rule(
        "No function or class has a word of WORDS", dialect_defined, SOURCES
    ),
    "behind": Rule("Only IN_FLIGHT says `behind`", words_of_order, SOURCES, IN_FLIGHT),
    "sections": Rule("Entries of Args exist in code", stale_entries, SOURCES),
}


def sources() -> Iterator[Path]:
    for folder in SOURCES:
        yield from sorted((ROOT / folder).rglob("*.py"))


def test_the_rules_are_kept() -> None:
    breaches = []
    for file in sources():
        path = file.relative_to(ROOT).as_posix()
        # Keeping all trees would slow down garbage collections.
        nodes = nodes_of(ast.parse(file.read_text(encoding="utf-8")))
        breaches += [
            f"{path}:{line}: {rule.says}: {text}"
            for rule in RULES.values()
            if path.startswith(rule.folders) and not path.startswith(rule.but)
            for line, text in rule.breaches(nodes)
        ]
    assert not breaches, "\n".join(breaches)


def test_files_have_words_of_the_field() -> None:
    paths = [file.relative_to(ROOT).as_posix() for file in sources()]
    named = [
        f"{path}: {WORDS.pattern}"
        for path in paths
        if path.startswith(PLAIN) and WORDS.search(Path(path).stem)
    ]
    assert not named, "\n".join(named)


@pytest.mark.parametrize(
    ("rule", "code", "count"),
    [
        ("openings", '"""What drafts."""\nclass A:\n    """Whether it is."""', 2),
        ("openings", '"""Return whether it is."""', 0),
        ("bare names", "def f(own): ...\nheld = 1\nself._found: int = 2", 3),
        ("bare names", "class A:\n    asked: int", 1),
        ("bare names", "other = held", 0),
        ("dialect", "told = in_turn_ = 1\ntolder = 2", 2),
        ("dialect, defined", "def heard(): ...\ndef lawful(): ...", 1),
        ("behind", "def left_behind(behind): ...", 2),
        (
            "sections",
            'def f(a, *b):\n    """F.\n\n    Args:\n        a: x.\n    """',
            0,
        ),
        (
            "sections",
            'def f(a, b):\n    """F.\n\n    Args:\n        a, c: x.\n    """',
            1,
        ),
        (
            "sections",
            'class A:\n    """A.\n\n    Args:\n        a: x.\n    """\n    a = 1',
            0,
        ),
    ],
)
def test_a_breach_is_seen(rule: str, code: str, count: int) -> None:
    assert len(list(RULES[rule].breaches(nodes_of(ast.parse(code))))) == count

"""Files, modules and objects of this package that texts name have to exist.

Texts name a path (`engine/round/verify.py`), a dotted name (`engine.Drafter`) or a
file alone (`registry.py`).
"""

import ast
import importlib
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("engine", "models", "caches", "samplers")
TOPS = (*FOLDERS, "tests", "scripts", "examples", "docs", "src/mlx_speculation")
# A path, but not the end of a longer path or address. The last part can be a pattern.
PATH = re.compile(rf"(?<![\w/.~-])(?:{'|'.join(TOPS)})/[\w./*-]*[\w*/]")
DOTTED = re.compile(r"(?<![\w/.:-])mlx_speculation(?:\.[A-Za-z_]\w*)+")
FOLDERS_NAME = re.compile(rf"`((?:{'|'.join(FOLDERS)})(?:\.[A-Za-z_]\w*)+)(?:\(\))?`")
FILE = re.compile(r"`([\w-]+\.(?:py|toml|sh))`")
# Names of what is not in this repository.
OTHERS = {
    "models/NAME",  # GET /v1/models/NAME
    "generate.py",  # of mlx-lm
}


@cache
def tracked() -> tuple[str, ...]:
    """Return the files that git knows or would add."""
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return tuple(name for name in done.stdout.splitlines() if (ROOT / name).is_file())


def prose(name: str) -> str:
    """Return the text of a file, or the docstrings and comments of a Python file."""
    text = (ROOT / name).read_text("utf-8")
    if not name.endswith(".py"):
        return text
    tree = ast.parse(text)
    said = [
        ast.get_docstring(node) or ""
        for node in ast.walk(tree)
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        )
    ]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    said += [token.string for token in tokens if token.type == tokenize.COMMENT]
    return "\n".join(said)


def texts() -> list[str]:
    pages = [
        name for name in tracked() if re.fullmatch(r"(docs/(log/)?)?\w+\.md", name)
    ]
    code = [name for name in tracked() if name.endswith(".py")]
    return [*pages, *code, "Makefile", "pyproject.toml", "mkdocs.yml"]


@cache
def files() -> frozenset[str]:
    return frozenset(Path(name).name for name in tracked())


@cache
def exists(path: str) -> bool:
    """Return whether a path, with or without `.py`, exists here."""
    stem = path.rstrip("/")
    if "*" in stem:
        return any(ROOT.glob(stem))
    return (ROOT / stem).exists() or (ROOT / f"{stem}.py").exists()


@cache
def resolves(dotted: str) -> bool:
    """Return whether a dotted name is a module, or an object in a module."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            target: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            fields = getattr(target, "__dataclass_fields__", {})
            if not hasattr(target, name) and name not in fields:
                return False
            target = getattr(target, name, None)
        return True
    return False


def unknown(text: str) -> Iterator[str]:
    for path in set(PATH.findall(text)) - OTHERS:
        if not exists(path):
            yield path
    for dotted in set(DOTTED.findall(text)):
        if not resolves(dotted):
            yield dotted
    for dotted in set(FOLDERS_NAME.findall(text)):
        if not resolves(f"mlx_speculation.{dotted}"):
            yield dotted
    yield from set(FILE.findall(text)) - files() - OTHERS


def test_what_is_named_is_there() -> None:
    """Parsing is slow, so only files that hold an unknown name are parsed."""
    whole = {name: (ROOT / name).read_text("utf-8") for name in texts()}
    doubtful = [name for name, text in whole.items() if any(unknown(text))]
    unknown_names = {name: sorted(unknown(prose(name))) for name in doubtful}
    assert not any(unknown_names.values()), unknown_names


@pytest.mark.parametrize(
    "text",
    [
        "see engine/rounds.py",
        "`engine/elsewhere/`, in models/mtp/contract",
        "tests/engine/batch/nothing_*.py",
        "mlx_speculation.caches.nowhere",
        "`engine.Nobody`",
        "`no_such_file.py`",
    ],
)
def test_a_name_of_nothing_is_found(text: str) -> None:
    assert list(unknown(text))


def test_names_of_what_there_is_are_left_alone() -> None:
    text = (
        "engine/round/verify.py and caches/journals/, models/mtp/*.py, tests/docs; "
        "mlx_speculation.caches.registry.JOURNALS, `engine.Drafter`, `registry.py`; "
        "https://example.com/engine/nothing"
    )
    assert list(unknown(text)) == []


def test_the_map_lists_the_rooms() -> None:
    """The section "Files" lists all folders with `__init__.py`, and no others."""
    page = (ROOT / "docs/architecture.md").read_text("utf-8")
    block = page.split("## Files")[1].split("```")[1]
    named, top = set(), ""
    for line in block.splitlines():
        top = re.sub(r"/ .*", "", line) if line[:1].strip() else top
        rest = line.removeprefix(f"{top}/")
        named |= {f"{top}/{room}" for room in re.findall(r"\b(\w+)/(?= |$)", rest)}
    opens = rf"((?:{'|'.join(FOLDERS)}|src/mlx_speculation)/\w+)/__init__\.py"
    rooms = [match[1] for name in tracked() if (match := re.fullmatch(opens, name))]
    assert named - {"examples/extending"} == set(rooms)

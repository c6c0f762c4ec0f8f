"""What the documentation shows is what there is: names, options, keywords."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import mlx_speculation
from mlx_speculation.cli.app import app
from support.import_order import mlx_comes_first

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
TEXTS = [ROOT / "README.md", *PAGES]


@pytest.mark.parametrize("page", TEXTS, ids=lambda path: path.stem)
def test_what_is_shown_imports_this_package_before_mlx(page: Path) -> None:
    """The other way around mlx keeps its reference BLAS on a Linux CPU."""
    text = page.read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    assert not [block for block in blocks if mlx_comes_first(block)]


def test_the_api_page_has_every_public_name() -> None:
    text = (ROOT / "docs" / "api.md").read_text("utf-8")
    listed = {line.rpartition(".")[2] for line in text.splitlines() if ":::" in line}
    errors = {name for name in mlx_speculation.__all__ if _is_warning_or_error(name)}
    missing = set(mlx_speculation.__all__) - listed - errors - {"__version__"}
    assert not missing
    assert "::: mlx_speculation.errors" in text


def _is_warning_or_error(name: str) -> bool:
    value = getattr(mlx_speculation, name, None)
    return isinstance(value, type) and issubclass(value, Exception)


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").split("\nnav:")[1]
    listed = re.findall(r"^ +- .+: (\w+\.md)$", nav, flags=re.MULTILINE)
    assert sorted(listed) == [page.name for page in PAGES]


def options() -> dict[str, set[str]]:
    """Return the options of each command."""
    commands: Any = typer.main.get_command(app)
    return {
        name: {option for parameter in command.params for option in parameter.opts}
        | {"--help"}
        for name, command in commands.commands.items()
    }


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_commands_that_are_shown_have_the_options_that_they_are_shown_with(
    page: Path,
) -> None:
    known = options()
    for line in page.read_text("utf-8").splitlines():
        for name, rest in re.findall(r"mlx-speculation ([a-z]+)\b([^`|#]*)", line):
            if not re.search(r"(^|`)\s*mlx-speculation", line):
                continue  # a sentence about the package
            assert name in known, line
            assert set(re.findall(r"--[a-z][a-z-]*", rest)) <= known[name], line


def test_the_readme_names_options_and_commands_that_there_are() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    part = text.split("\n## Command line\n")[1].split("\n## ")[0]
    known = options()
    assert set(re.findall(r"^\| `([a-z]+)`", part, flags=re.MULTILINE)) == set(known)
    everywhere = set[str]().union(*known.values())
    assert set(re.findall(r"--[a-z][a-z-]*[a-z]", part)) <= everywhere


def calls(page: Path) -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls in the Python blocks of a page, by the name that is called."""
    for block in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Call):
                yield ast.unparse(node.func).rpartition(".")[2], node


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_calls_that_are_shown_have_keywords_that_there_are(page: Path) -> None:
    generator = mlx_speculation.SpeculativeGenerator
    made: dict[str, Any] = {
        name: getattr(mlx_speculation, name) for name in mlx_speculation.__all__
    } | {name: getattr(generator, name) for name in ("from_pretrained", "stream")}
    for name, call in calls(page):
        if name == "generate" and ast.unparse(call.func) != "generate":
            name = "stream"  # takes the same
        if name not in made or isinstance(made[name], str):
            continue
        if _is_warning_or_error(name):
            continue  # they take a message
        taken = inspect.signature(made[name]).parameters
        if any(p.kind is p.VAR_KEYWORD for p in taken.values()):
            taken = inspect.signature(made["stream_generate"]).parameters
        given = {keyword.arg for keyword in call.keywords if keyword.arg is not None}
        assert given <= set(taken), ast.unparse(call)

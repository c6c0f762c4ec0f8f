"""The documentation has only names, options, keywords and links that exist."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Unpack, get_args, get_origin

import typer

import mlx_speculation
from mlx_speculation.cli.app import app
from mlx_speculation.engine.stream import Stream
from support import command_line_page
from support.import_order import mlx_comes_first
from support.pages import DOCS, PAGES, README, ROOT, TEXTS, blocks, name_of

HOME = "https://github.com/mlx-speculation/mlx-speculation"


def test_what_is_shown_imports_this_package_before_mlx() -> None:
    """If mlx is imported first, it keeps its reference BLAS on a Linux CPU."""
    for page in TEXTS:
        wrong = [block for block in blocks(page, "python") if mlx_comes_first(block)]
        assert not wrong, name_of(page)


def test_the_api_page_has_every_public_name() -> None:
    """The page also lists types that public functions return or take."""
    text = (DOCS / "api.md").read_text("utf-8")
    listed = {line.rpartition(".")[2] for line in text.splitlines() if ":::" in line}
    listed -= {"BatchStatistics", "Chunk", "Drafter", "Journal", "Proposal", "Result"}
    listed -= {"Statistics", "Stream", "StreamOptions", "errors"}
    errors = {name for name in mlx_speculation.__all__ if _is_warning_or_error(name)}
    assert set(mlx_speculation.__all__) - errors == listed - {"errors"} | {
        "__version__"
    }


def _is_warning_or_error(name: str) -> bool:
    value = getattr(mlx_speculation, name, None)
    return isinstance(value, type) and issubclass(value, Exception)


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").split("\nnav:")[1]
    listed = re.findall(r"^ +- .+: ([\w/]+\.md)$", nav, flags=re.MULTILINE)
    assert sorted(listed) == [str(page.relative_to(DOCS)) for page in PAGES]


def test_pages_can_be_searched_without_a_server_or_a_network() -> None:
    """The search needs the plugin `offline` and a local copy of the plugin's script."""
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert re.search(r"^  - offline\b", text, re.MULTILINE)
    (polyfill,) = re.findall(r"polyfills: \[(\S+)\]", text)
    assert "iframe-worker" in polyfill  # the plugin looks for this name
    assert (DOCS / polyfill).is_file()
    assert "https://" not in re.sub(r"#.*", "", text)


def test_the_api_page_names_members_of_a_stream_that_there_are() -> None:
    text = (DOCS / "api.md").read_text("utf-8")
    (named,) = re.findall(r"stream\.Stream\n.*\n +members: \[(.*)\]", text)
    members = set(named.split(", "))
    assert members >= {"result", "close", "stats"}
    assert not [each for each in members if not hasattr(Stream, each)]


def test_pages_can_be_read_in_one_sitting() -> None:
    sizes = {name_of(page): page.stat().st_size for page in TEXTS}
    assert sizes.pop("README.md") <= 9 << 10
    assert not {name: size for name, size in sizes.items() if size >= 12 << 10}
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8").splitlines()
    assert len(changes) <= 40


def targets(page: Path) -> list[str]:
    """Return the targets of the links on a page, except in code."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text("utf-8"), flags=re.DOTALL)
    inline = re.findall(r"\]\(([^)\s]+)\)", text)
    return inline + re.findall(r"^\[[\w-]+\]: (\S+)$", text, re.MULTILINE)


def test_links_of_the_readme_work_anywhere_it_is_shown() -> None:
    """PyPI shows the README too, and relative links lead nowhere there."""
    links = targets(README)
    assert links
    assert not [link for link in links if not link.startswith(("https://", "#"))]
    for link in links:
        if link.startswith(HOME):
            _, _, path = link.removeprefix(HOME).partition("/main/")
            assert (ROOT / path.partition("#")[0]).exists(), link
    text = README.read_text("utf-8")
    defined = re.findall(r"^\[([\w-]+)\]: ", text, re.MULTILINE)
    used = re.findall(r"\]\[([\w-]+)\]", text)
    assert sorted(set(used)) == sorted(defined)


def test_links_between_pages_lead_to_a_heading() -> None:
    headings = {page: anchors(page) for page in PAGES}
    for page in PAGES:
        for link in targets(page):
            if link.startswith("https://"):
                continue
            path, _, anchor = link.partition("#")
            other = (page.parent / path).resolve() if path else page
            assert other in headings, f"{name_of(page)}: {link}"
            assert not anchor or anchor in headings[other], f"{name_of(page)}: {link}"


def anchors(page: Path) -> set[str]:
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    names = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        words = re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower()
        names.add(re.sub(r"[\s-]+", "-", words))
    return names


def options() -> dict[str, set[str]]:
    return {
        name: {option for parameter in command.params for option in parameter.opts}
        | {"--help"}
        for name, command in command_line_page.commands().items()
    }


def test_commands_in_sentences_have_options_that_there_are() -> None:
    """tests/docs/test_commands.py parses the commands in shell blocks."""
    known = options()
    for page in TEXTS:
        for line in page.read_text("utf-8").splitlines():
            for name, rest in re.findall(r"`mlx-speculation ([a-z]+)\b([^`]*)`", line):
                assert name in known, line
                assert set(re.findall(r"--[a-z][a-z-]*", rest)) <= known[name], line


def test_the_page_on_the_command_line_is_current() -> None:
    page = (DOCS / "command_line.md").read_text("utf-8")
    assert page == command_line_page.page(), (
        "write it: PYTHONPATH=src:tests python -m support.command_line_page "
        "docs/command_line.md"
    )


def test_pages_of_a_command_of_its_own_have_every_option() -> None:
    for name, page in (("serve", "server.md"), ("train", "training.md")):
        text = (DOCS / page).read_text("utf-8")
        group: Any = typer.main.get_command(app)
        ours = [
            parameter
            for parameter in group.commands[name].params
            if parameter.opts[0].startswith("--")
        ]
        missing = [each.opts for each in ours if f"`{each.opts[0]}`" not in text]
        assert missing == [], page


def calls(page: Path) -> Iterator[tuple[str, ast.Call]]:
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Call):
                yield ast.unparse(node.func).rpartition(".")[2], node


def keywords_of(call: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters of a callable, and the keys of an unpacked TypedDict."""
    taken = dict(inspect.signature(call).parameters)
    typed = getattr(taken.get("options"), "annotation", None)
    for keywords in get_args(typed) if get_origin(typed) is Unpack else ():
        del taken["options"]
        for name in keywords.__annotations__:
            taken[name] = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
    return taken


def test_calls_that_are_shown_have_keywords_that_there_are() -> None:
    """Blocks that tests/docs/test_snippets.py cannot run are checked too."""
    generator = mlx_speculation.SpeculativeGenerator
    made: dict[str, Any] = {
        name: getattr(mlx_speculation, name) for name in mlx_speculation.__all__
    } | {name: getattr(generator, name) for name in ("from_pretrained", "stream")}
    for page in TEXTS:
        for name, call in calls(page):
            if name == "generate" and ast.unparse(call.func) != "generate":
                name = "stream"  # takes the same keywords
            if name not in made or isinstance(made[name], str):
                continue
            if _is_warning_or_error(name):
                continue  # warnings and errors take a message
            taken = keywords_of(made[name])
            if any(p.kind is p.VAR_KEYWORD for p in taken.values()):
                taken = keywords_of(made["stream_generate"])
            given = {keyword.arg for keyword in call.keywords if keyword.arg}
            assert given <= set(taken), f"{name_of(page)}: {ast.unparse(call)}"

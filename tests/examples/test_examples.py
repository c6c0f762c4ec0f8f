"""Each example runs on the bundled models, and is short."""

import ast
import re
from pathlib import Path

import pytest

import mlx_speculation
from support.import_order import mlx_comes_first
from support.processes.reader import Reader

ROOT = Path(__file__).parents[2]
# Output of each example. An example that stops early does not print it.
SAYS = {
    "batch": r"class Queue:.*\n---\n.*\n112 tokens in \d+ forwards\n",
    "drop_in": r"draft_model=draft: \d+ tokens/s, \d+% accepted\n.*\nclass Queue:",
    "json_text": r"parsed: \{'name': '.*', 'kind': '\w+', 'lines': \d+\}\n",
    "own_benchmark": r"0 drafted: .* 1\.00 x plain\n3 drafted: .*\n",
    "saved_prompt_cache": r"\d{2,} tokens in \d+ KiB\n",
    "several_ranks": r"def __init__.*\n[1-9]\d* of \d+ drafted tokens .*\n1 ranks\n",
    "simplest": r"[1-9]\d* of \d+ drafted tokens were accepted\n",
    "streaming_chat": r"The caches hold \d{2,} tokens of 2 turns\.\n",
}
LONG = ("own_benchmark",)  # takes ten seconds
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# Also the programs in examples/extending, which tests/docs/test_extending.py runs.
ALL = sorted((ROOT / "examples").rglob("*.py"))


def test_every_example_is_tried() -> None:
    assert {example.stem for example in EXAMPLES} == set(SAYS)


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(path, marks=pytest.mark.slow if path.stem in LONG else ())
        for path in EXAMPLES
    ],
    ids=lambda path: path.stem,
)
def test_an_example_runs_on_the_bundled_models(example: Path, reader: Reader) -> None:
    said = reader.program(example)
    assert re.search(SAYS[example.stem], said.out, flags=re.DOTALL), said.out
    assert said.err == ""


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_what_it_shows(example: Path) -> None:
    text = example.read_text("utf-8")
    assert len(text.splitlines()) < 40
    assert ast.get_docstring(ast.parse(text))


@pytest.mark.parametrize("example", ALL, ids=lambda path: path.stem)
def test_an_example_imports_this_package_before_mlx(example: Path) -> None:
    """If mlx is imported first, it keeps its reference BLAS on a Linux CPU."""
    assert not mlx_comes_first(example.read_text("utf-8"))


def test_the_first_page_lists_the_examples() -> None:
    page = (ROOT / "docs/index.md").read_text("utf-8")
    assert not [e.name for e in ALL if str(e.relative_to(ROOT)) not in page]


def test_examples_use_public_names_alone_but_for_the_drafters_types() -> None:
    for example in ALL:
        for node in ast.walk(ast.parse(example.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "mlx_speculation":
                names = {alias.name for alias in node.names}
                assert names <= set(mlx_speculation.__all__), example.name

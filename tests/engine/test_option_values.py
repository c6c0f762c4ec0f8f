"""The options are listed once, and the public calls are typed by that list."""

import ast
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from mlx_speculation import InvalidRequestError, SpeculativeGenerator
from mlx_speculation.engine.options import (
    GeneratorKeywords,
    GeneratorOptions,
    StreamKeywords,
    StreamOptions,
)

PAIRS = [(GeneratorOptions, GeneratorKeywords), (StreamOptions, StreamKeywords)]
ROOT = Path(__file__).parents[2]
PRODUCT = [ROOT / name for name in ("engine", "caches", "models", "samplers", "src")]


@pytest.mark.parametrize(("options", "keywords"), PAIRS)
def test_keywords_are_the_fields_in_names_types_and_order(
    options: Any, keywords: Any
) -> None:
    hints = get_type_hints(options)
    assert list(get_type_hints(keywords).items()) == [
        (field.name, hints[field.name]) for field in fields(options)
    ]
    assert keywords.__required_keys__ == frozenset()


@pytest.mark.parametrize(
    "call", ["__init__", "from_pretrained", "stream", "generate", "generate_batch"]
)
def test_public_calls_spell_out_no_option(call: str) -> None:
    taken = signature(getattr(SpeculativeGenerator, call)).parameters
    names = {field.name for options, _ in PAIRS for field in fields(options)}
    assert not names & taken.keys()
    assert taken["options"].kind is taken["options"].VAR_KEYWORD


def spelled_out(source: str, *lists: set[str]) -> int:
    """Return the largest number of options in one signature, call or dict display."""
    most = 0
    for node in ast.walk(ast.parse(source)):
        given: set[Any] = set()
        if isinstance(node, ast.FunctionDef):
            given = {each.arg for each in (*node.args.args, *node.args.kwonlyargs)}
        elif isinstance(node, ast.Call):
            given = {each.arg for each in node.keywords}
        elif isinstance(node, ast.Dict):
            given = {each.value for each in node.keys if isinstance(each, ast.Constant)}
        most = max(most, *(len(names & given) for names in lists))
    return most


def test_no_function_of_the_product_lists_the_options_again() -> None:
    """Functions with names of mlx-lm do; others may list at most six options."""
    lists = [{field.name for field in fields(options)} for options, _ in PAIRS]
    paths = [path for folder in PRODUCT for path in folder.rglob("*.py")]
    counts = {
        path.relative_to(ROOT).as_posix(): spelled_out(path.read_text(), *lists)
        for path in paths
        if "mlx_lm_compat" not in path.parts
    }
    assert len(counts) > 400
    assert not {path: count for path, count in counts.items() if count > 6}
    assert spelled_out("def f(a, *, b, c): g(c=1)", {"a", "b", "c"}) == 3
    assert spelled_out("f(**{'a': 1, **c, 'b': 2})", {"a", "b", "c"}) == 2


@pytest.mark.parametrize(
    ("options", "wrong", "said"),
    [
        (StreamOptions, {"max_tokens": -1}, "max_tokens is -1"),
        (StreamOptions, {"sampling": {"seed": 1}}, "sampling is {'seed': 1}"),
        (StreamOptions, {"stop": ("a", "")}, "stop string is empty"),
        (StreamOptions, {"logprobs": -1}, "logprobs is -1"),
        (StreamOptions, {"constraint": "json"}, "constraint is a str"),
        (GeneratorOptions, {"acceptance": "greedy"}, "acceptance is 'greedy'"),
        (GeneratorOptions, {"sliding": "ring"}, "sliding is 'ring'"),
        (GeneratorOptions, {"exact": 0}, "0"),
        (GeneratorOptions, {"compile_draft": 1}, "compile_draft is 1"),
        (GeneratorOptions, {"draft_vocabulary": "all"}, "draft_vocabulary is 'all'"),
        (GeneratorOptions, {"draft_tree": 1}, "draft_tree is 1"),
        (GeneratorOptions, {"draft_tree": 65}, "64 nodes are the most"),
        (GeneratorOptions, {"draft_tree": 8, "exact": 8}, "exact was passed"),
    ],
)
def test_a_wrong_value_is_refused_where_the_options_are_made(
    options: Any, wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        options(**wrong)

"""The options are listed once, and the public calls are typed by that list."""

from dataclasses import fields
from typing import Any, get_type_hints

import pytest

from mlx_speculation import InvalidRequestError
from mlx_speculation.engine.options import (
    GeneratorKeywords,
    GeneratorOptions,
    StreamKeywords,
    StreamOptions,
)

PAIRS = [(GeneratorOptions, GeneratorKeywords), (StreamOptions, StreamKeywords)]


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
    ("options", "wrong", "said"),
    [
        (StreamOptions, {"logprobs": -1}, "logprobs is -1"),
        (
            StreamOptions,
            {"constraint": {}},
            r"is a dict.*json_schema\(\.\.\.\)",
        ),
        (GeneratorOptions, {"acceptance": "fast"}, "'fast'.*'keyed' or 'rejection'"),
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

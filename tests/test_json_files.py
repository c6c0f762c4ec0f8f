"""JSON of other programs is read as Python reads it, or raises `JsonFlawError`."""

import json
import os
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_speculation.json_files import (
    DEEPEST,
    JsonFlawError,
    deeper_than,
    load_json,
    parse_json,
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def depth(value: Any) -> int:
    if not isinstance(value, list | dict):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(map(depth, inner), default=0)


@given(VALUES)
def test_what_is_json_is_read_as_python_reads_it(value: Any) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
        assert parse_json(text, unique_keys=True, finite=True) == value
        assert deeper_than(depth(value), text) is False
        assert depth(value) == 0 or deeper_than(depth(value) - 1, text)


@given(st.text(alphabet='[]{}",:\\ 1anN') | st.binary())
def test_what_is_not_is_one_error(text: str | bytes) -> None:
    try:
        expected = json.loads(text if isinstance(text, str) else text.decode("utf-8"))
    except ValueError:
        with pytest.raises(JsonFlawError):
            parse_json(text)
    else:
        # Compared as text, since NaN is not equal to itself.
        assert repr(parse_json(text)) == repr(expected)


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"[":'])
def test_nesting_is_refused_without_python_s_stack(opening: str) -> None:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(10**6)  # at this limit Python's parser would crash
    try:
        for text in (opening * 10**6, opening * DEEPEST + '"'):
            with pytest.raises(JsonFlawError, match=r"nested too deep|not JSON"):
                parse_json(text)
    finally:
        sys.setrecursionlimit(before)


def test_nesting_is_read_as_far_as_is_said() -> None:
    assert depth(parse_json("[" * DEEPEST + "]" * DEEPEST)) == DEEPEST
    with pytest.raises(JsonFlawError, match=f"more than {DEEPEST} levels"):
        parse_json("[" * (DEEPEST + 1) + "]" * (DEEPEST + 1))
    brackets = "[" * 1000
    assert parse_json(json.dumps([brackets, f'\\"{brackets}'])) == [
        brackets,
        f'\\"{brackets}',
    ]


@pytest.mark.parametrize(
    ("text", "option", "said"),
    [
        ('{"a": 1, "a": 2}', "unique_keys", "has the key 'a' twice"),
        ('[{"b": {"a": 1, "a": 1}}]', "unique_keys", "has the key 'a' twice"),
        ("NaN", "finite", "not a JSON number"),
        ("[-Infinity]", "finite", "not a JSON number"),
        ('{"a": Infinity}', "finite", "not a JSON number"),
    ],
)
def test_what_python_reads_is_refused_where_it_shall_be(
    text: str, option: Literal["unique_keys", "finite"], said: str
) -> None:
    assert parse_json(text)
    with pytest.raises(JsonFlawError, match=said):
        parse_json(text, unique_keys=option == "unique_keys", finite=option == "finite")


def test_a_file_is_read_up_to_a_size(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_bytes(b"[1] ")
    assert load_json(file, most=4) == [1]
    with pytest.raises(JsonFlawError, match="has more than 3 bytes"):
        load_json(file, most=3)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(JsonFlawError, match="a folder or a device"):
            load_json(tmp_path / name)
    for name in ("nothing", "\0", "long" * 100):
        with pytest.raises(JsonFlawError, match="cannot be opened"):
            load_json(tmp_path / name)

"""Bias and penalties: mlx-lm's values to the last bit, for many rows at once."""

from typing import Any

import mlx.core as mx
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.sample_utils import make_logits_processors

from mlx_speculation.samplers import Rows, Sampling
from mlx_speculation.samplers.logits.penalties import Penalties
from mlx_speculation.samplers.row_context import KnownTokens
from support.sampling.sampling_options import penalty_options

VOCAB = 12
IDS = st.integers(0, VOCAB - 1)


@st.composite
def some_rows(draw: st.DrawFn) -> Rows:
    known = draw(st.lists(IDS, min_size=1, max_size=15))
    drafted = draw(st.lists(IDS, max_size=4))
    ahead = mx.array(drafted, dtype=mx.uint32) if drafted else None
    count = draw(st.integers(1, len(known) + len(drafted)))
    return Rows(known, ahead, count, draw(st.sampled_from([0, 7])))


def texts(rows: Rows) -> list[list[int]]:
    drafted: Any = [] if rows.ahead is None else rows.ahead.tolist()
    whole = [*rows.known, *drafted]
    return [whole[: len(whole) + 1 - back] for back in range(rows.count, 0, -1)]


def some_logits(count: int, dtype: mx.Dtype, key: int, width: int = VOCAB) -> mx.array:
    drawn = 4 * mx.random.normal((count, width), key=mx.random.key(key))
    return drawn.astype(dtype)


@given(
    options=penalty_options(VOCAB),
    rows=some_rows(),
    dtype=st.sampled_from([mx.float32, mx.bfloat16, mx.float16]),
    key=st.integers(0, 10**6),
)
def test_all_rows_at_once_equal_mlx_lms_processors_on_each_row(
    options: dict[str, Any], rows: Rows, dtype: mx.Dtype, key: int
) -> None:
    logits = some_logits(rows.count, dtype, key)
    before = mx.array(logits)
    got = Penalties(Sampling(**options)).apply(logits, rows)
    assert mx.array_equal(logits, before).item()
    processors = make_logits_processors(**options)
    for index, text in enumerate(texts(rows)):
        expected = logits[index : index + 1]
        for processor in processors:
            expected = processor(mx.array(text), expected)
        assert got.dtype == expected.dtype
        assert mx.array_equal(got[index], expected[0]).item()


@given(options=penalty_options(VOCAB), rows=some_rows(), key=st.integers(0, 10**6))
def test_ids_past_the_width_change_nothing(
    options: dict[str, Any], rows: Rows, key: int
) -> None:
    """A draft can have fewer ids than the target."""
    logits = some_logits(rows.count, mx.float32, key)
    penalties = Penalties(Sampling(**options))
    wide = penalties.apply(logits, rows)
    narrow = penalties.apply(logits[:, :5], rows)
    assert mx.array_equal(narrow, wide[:, :5]).item()


@given(rows=some_rows(), size=st.integers(0, 20), keep=st.booleans())
def test_windows_and_prefixes_hold_the_tokens_before_each_row(
    rows: Rows, size: int, keep: bool
) -> None:
    known = KnownTokens() if keep else None
    windows = rows.windows(size, known)
    prefixes = rows.prefixes(known)
    for index, text in enumerate(texts(rows)):
        valid: Any = windows.valid[index].tolist()
        kept = windows.tokens[index][sum(not v for v in valid) :]
        assert valid == sorted(valid)
        assert kept.tolist() == text[-size:]
        assert prefixes[index].tolist() == text
        assert prefixes[index].dtype == mx.int32
        alone = rows.some(index)
        assert list(alone.positions) == [rows.positions[index]]
        assert alone.prefixes()[0].tolist() == text


def test_a_row_without_any_named_token_has_an_empty_window() -> None:
    rows = Rows([], None, 1, start=5)
    windows = rows.windows(3)
    assert windows.valid.tolist() == [[False] * 3]
    assert rows.prefixes()[0].shape == (0,)
    options = Sampling(repetition_penalty=2, presence_penalty=2, frequency_penalty=2)
    logits = some_logits(1, mx.float32, 0)
    assert mx.array_equal(Penalties(options).apply(logits, rows), logits).item()
    later = Rows([], mx.array([3], dtype=mx.uint32), 2, start=5)
    assert later.windows(2).valid.tolist() == [[False, False], [False, True]]


@given(
    steps=st.lists(
        st.tuples(st.integers(1, 400), st.booleans()), min_size=1, max_size=6
    )
)
def test_known_tokens_follow_a_text_that_grows_and_shrinks(
    steps: list[tuple[int, bool]],
) -> None:
    """With `forget` the text is a new list, whose tokens are converted again."""
    known = KnownTokens()
    text: list[int] = []
    for amount, forget in steps:
        if forget:
            text = [token + 1 for token in text]
        text.extend(range(amount))
        assert known.since(text, len(text) // 2).tolist() == text[len(text) // 2 :]
        assert Rows(text).prefixes(known)[0].tolist() == text
        removed = text[-1:]
        del text[-1:]
        assert known.since(text).tolist() == text
        text += removed


def test_a_prefix_stays_as_it_is_when_the_text_goes_on() -> None:
    known, text = KnownTokens(), list(range(300))
    prefix = Rows(text).prefixes(known)[0]
    del text[200:]
    text += [7] * 500
    Rows(text).prefixes(known)
    assert prefix.tolist() == list(range(300))

"""Streamed text has whole characters only, and no part of a stop string."""

import logging
import random
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_speculation import SpeculativeGenerator
from mlx_speculation.engine.detokenizer import (
    INCOMPLETE,
    StopStrings,
    TextDetokenizer,
)
from mlx_speculation.samplers import TokenAutomaton
from support.models.tiny_models import build
from support.models.tiny_tokenizer import (
    PIECES,
    byte_tokenizer,
    merging_tokenizer,
    metaspace_tokenizer,
    sentencepiece_tokenizer,
    suffix_tokenizer,
    wordpiece_tokenizer,
)

TOKENIZER = byte_tokenizer()
LLAMA = sentencepiece_tokenizer()
GEMMA = sentencepiece_tokenizer(strips=False)
OTHERS = {
    "merges": merging_tokenizer(3, 300),
    "metaspace": metaspace_tokenizer("always"),
    "metaspace first": metaspace_tokenizer("first"),
    "metaspace never": metaspace_tokenizer("never"),
    "wordpiece": wordpiece_tokenizer(),
    "suffix": suffix_tokenizer(),
}
BYTE_RUNS = st.sampled_from([[*char.encode()] for char in "日😀ñ~"])
WORDS = st.text(st.sampled_from("ab ,né→日😀\n"), max_size=40)


def byte_level(data: bytes) -> list[int]:
    """Return the ids of bytes, in the alphabet of byte-level tokenizers."""
    known = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = sorted({*range(256)} - {*known})
    signs = {byte: chr(byte) for byte in known}
    signs |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [TOKENIZER.convert_tokens_to_ids(signs[byte]) for byte in data]


def streamed(tokenizer: Any, tokens: Sequence[int]) -> tuple[list[str], str]:
    """Return the streamed pieces of a text, and the rest at its end."""
    stream = TextDetokenizer(tokenizer, (), ())
    pieces = [stream.add(token)[0] for token in tokens]
    return pieces, stream.finish()[0]


@given(text=WORDS, cut=st.integers(0, 90))
def test_all_but_half_a_character_is_shown_at_once(text: str, cut: int) -> None:
    tokens = TOKENIZER.encode(text)[:cut]
    pieces, rest = streamed(TOKENIZER, tokens)
    for count, shown in enumerate(accumulate(pieces), start=1):
        assert shown == text.encode()[:count].decode("utf-8", "ignore")
    assert rest == ""


@given(
    parts=st.lists(
        st.one_of(st.sampled_from([[256 + i] for i in range(len(PIECES))]), BYTE_RUNS),
        max_size=40,
    ),
    tokenizer=st.sampled_from([LLAMA, GEMMA]),
)
def test_text_of_pieces_and_bytes_is_what_decode_makes_of_them(
    parts: list[list[int]], tokenizer: Any
) -> None:
    tokens = [token for part in parts for token in part]
    pieces, rest = streamed(tokenizer, tokens)
    assert "".join(pieces) + rest == tokenizer.decode(tokens)
    count, shown = 0, ""
    for part in parts:
        end = count + len(part)
        # A character of several bytes is streamed whole, with its last byte.
        assert [*filter(None, pieces[count:end])] == [
            *filter(None, pieces[end - 1 : end])
        ]
        shown += pieces[end - 1]
        count = end
        assert shown == tokenizer.decode(tokens[:count])


@given(name=st.sampled_from(sorted(OTHERS)), data=st.data())
def test_text_is_what_decode_makes_of_all_tokens(
    name: str, data: st.DataObject
) -> None:
    tokenizer = OTHERS[name]
    ids = st.integers(0, len(tokenizer) + 1)  # also ids that it lacks
    tokens = data.draw(st.lists(ids, max_size=60))
    pieces, rest = streamed(tokenizer, tokens)
    text = tokenizer.decode(tokens)
    assert ("".join(pieces) + rest).rstrip(INCOMPLETE) == text.rstrip(INCOMPLETE)
    for count, shown in enumerate(accumulate(pieces), start=1):
        more = tokenizer.decode(tokens[:count]).removeprefix(shown)
        assert more in ("", *(INCOMPLETE * n for n in (1, 2, 3)))


@pytest.mark.parametrize(
    "tokenizer",
    [metaspace_tokenizer("always", cleans=True), wordpiece_tokenizer(cleans=True)],
)
def test_spaces_that_decode_removes_are_never_shown(tokenizer: Any) -> None:
    draw = random.Random(0)
    for _ in range(1000):
        some = draw.choices(range(len(tokenizer)), k=4)
        tokens = draw.choices(some, k=draw.randrange(40))
        pieces, rest = streamed(tokenizer, tokens)
        assert "".join(pieces) + rest == tokenizer.decode(tokens)


def test_text_that_depends_on_all_tokens_is_decoded_from_all() -> None:
    class Shifted:
        def decode(self, ids: list[int]) -> str:
            text = "".join(map(chr, ids))
            return text.upper() if ids[0] == ord("^") else text

    assert "".join(streamed(Shifted(), [*b"^abcd" * 9])[0]) == "^ABCD" * 9


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=6),
)
def test_text_is_cut_before_the_first_stop_however_it_arrives(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    strings = StopStrings(stops)
    shown, stopped = "", False
    for start, stop in pairwise([0, *sorted(cuts), len(text)]):
        piece, stopped = strings.add(text[start:stop])
        shown += piece
        if stopped:
            break
        assert not any(s in shown for s in stops)
    if not stopped:
        shown += strings.flush()
    places = [text.find(s) for s in stops if s in text]
    assert stopped == bool(places)
    if not places:
        assert shown == text
    else:
        assert text.startswith(shown)
        assert not any(s in shown for s in stops)


def test_a_stop_is_found_as_soon_as_it_is_whole() -> None:
    strings = StopStrings(["</s>", "END"])
    assert strings.add("a</") == ("a", False)
    assert strings.add("b>E") == ("</b>", False)
    assert strings.add("N") == ("", False)
    assert strings.add("D!") == ("", True)


def test_a_stop_token_ends_the_text_without_being_shown() -> None:
    stream = TextDetokenizer(TOKENIZER, {5}, ())
    token = TOKENIZER.encode("x")[0]
    assert stream.add(token) == ("x", False)
    assert stream.add(5) == ("", True)


@given(tokenizer=st.sampled_from([LLAMA, TOKENIZER]), data=st.data())
def test_bytes_that_are_no_text_lose_and_repeat_nothing(
    tokenizer: Any, data: st.DataObject
) -> None:
    """Streamed text has, in order, every whole character that `decode` has."""
    odd = st.sampled_from([0xFF, 0xF0, 0x9F, 0x98, 0x80, 0xE6, 0x97, 0xA5, 0x61])
    drawn = bytes(data.draw(st.lists(odd, max_size=60)))
    tokens = byte_level(drawn) if tokenizer is TOKENIZER else [*drawn]
    pieces, rest = streamed(tokenizer, tokens)
    text, decoded = "".join(pieces) + rest, tokenizer.decode(tokens)
    if tokenizer is TOKENIZER:
        assert text.rstrip(INCOMPLETE) == decoded.rstrip(INCOMPLETE)
    left = iter(text)
    assert all(char in left for char in decoded if char != INCOMPLETE)
    assert len(text) <= len(decoded)


def test_half_a_character_at_the_end_leaves_the_whole_ones() -> None:
    tokens = [*"日😀".encode()]
    for count, text in ((3, "日"), (4, "日"), (6, "日"), (7, "日😀")):
        pieces, rest = streamed(LLAMA, tokens[:count])
        assert "".join(pieces) + rest == text
    for count in range(1, 20):
        invalid = [*("日" * count).encode(), 0xFF, 256 + PIECES.index("▁a")]
        assert "".join(streamed(LLAMA, invalid)[0]) == f"{'日' * count}{INCOMPLETE} a"
    invalid = [0xFF, *("日" * 40).encode()]
    text = "".join(streamed(LLAMA, invalid)[0])
    assert 3 * text.count("日") + text.count(INCOMPLETE) <= len(invalid)


@pytest.mark.parametrize("tokenizer", [TOKENIZER, LLAMA])
@pytest.mark.parametrize("data", [b"a", b"\xff", b" ", "日".encode(), "日😀".encode()])
def test_each_token_decodes_few_others(tokenizer: Any, data: bytes) -> None:
    data = "é".encode() + data * 1000 + b"\xff" * 1000
    tokens = byte_level(data) if tokenizer is TOKENIZER else [*data]
    decoded = 0

    class Counted:
        clean_up_tokenization_spaces = False

        def decode(self, ids: list[int]) -> str:
            nonlocal decoded
            decoded += len(ids)
            return str(tokenizer.decode(ids))

    streamed(Counted(), tokens)
    assert decoded < 32 * len(tokens)


def test_a_tokenizer_that_cleans_in_vain_logs_nothing() -> None:
    """transformers does not clean BPE texts, and would warn at the first token."""
    quiet = byte_tokenizer()
    quiet.clean_up_tokenization_spaces = True
    lines: list[logging.LogRecord] = []
    logger = logging.getLogger("transformers.tokenization_utils_tokenizers")
    handler = logging.Handler()
    handler.emit = lines.append  # type: ignore[method-assign, assignment]
    logger.addHandler(handler)
    try:
        pieces, _ = streamed(quiet, quiet.encode("a ."))
    finally:
        logger.removeHandler(handler)
    assert (pieces, lines) == (["a", " ", "."], [])


@pytest.mark.parametrize("name", ["bytes", "llama", "gemma"])
def test_a_continuation_begins_with_its_space(name: str) -> None:
    """A constraint forces the tokens, and a draft model drafts some of them."""
    tokenizer: Any = {"bytes": TOKENIZER, "llama": LLAMA, "gemma": GEMMA}[name]
    if name == "bytes":
        tokens = TOKENIZER.encode("  Paris. 日'")
    else:
        words = [256 + PIECES.index(piece) for piece in ("▁", "▁Paris", ".", "▁")]
        tokens = [*words, *"日".encode(), 256 + PIECES.index("'")]
    text = tokenizer.decode(tokens)
    assert text.lstrip(" ") == "Paris. 日'"
    model, draft = (build("llama", seed=seed, vocab=270) for seed in (0, 1))
    generator = SpeculativeGenerator(model, tokenizer, draft=draft, draft_length=3)
    forced = {i: {token: i + 1} for i, token in enumerate(tokens)}
    constraint = TokenAutomaton(forced, accepting={len(tokens)})
    for stop in (None, " Paris", "  P", " 日", "日'"):
        result = generator.generate(
            [1, 2, 3], max_tokens=len(tokens), constraint=constraint, stop=stop or ()
        )
        at = text.find(stop) if stop else -1
        assert result.text == (text if at < 0 else text[:at]), stop
        assert result.finish_reason == "stop"

"""Streamed text: whole characters only, and nothing of a stop string."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from mlx_speculation.engine.detokenizer import StopStrings, TextDetokenizer
from support.models.tiny_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
WORDS = st.text(st.sampled_from("ab ,né→日😀\n"), min_size=1, max_size=12)


@given(text=WORDS, cut=st.integers(0, 40))
def test_every_piece_and_the_end_hold_whole_characters(text: str, cut: int) -> None:
    tokens = TOKENIZER.encode(text)[:cut]
    stream = TextDetokenizer(TOKENIZER.detokenizer, (), ())
    shown = ""
    for token in tokens:
        piece, stopped = stream.add(token)
        shown += piece
        assert not stopped
        # mlx-lm's detokenizer drops one space at the very beginning.
        assert text.startswith(shown) or text.removeprefix(" ").startswith(shown)
    shown += stream.finish()[0]
    whole = text.encode()[: len(tokens)].decode("utf-8", "ignore")
    assert shown in (whole, whole.removeprefix(" "))


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
        # What was shown is never part of a stop that is still to come.
        assert not any(s in shown for s in stops)
    if not stopped:
        shown += strings.flush()
    found = [text.find(s) for s in stops if s in text]
    assert stopped == bool(found)
    if not found:
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
    stream = TextDetokenizer(TOKENIZER.detokenizer, {5}, ())
    token = TOKENIZER.encode("x")[0]
    assert stream.add(token) == ("x", False)
    assert stream.add(5) == ("", True)

"""Grammars as constraints allow exactly the texts that fit."""

import gc
import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_speculation import demo_models
from mlx_speculation.errors import (
    ConstraintError,
    InvalidRequestError,
    MissingLibraryError,
)
from mlx_speculation.samplers import Constraint, ConstraintState
from mlx_speculation.samplers.constraints import llguidance
from mlx_speculation.samplers.constraints.llguidance import (
    Grammar,
    GrammarState,
    json_schema,
    lark,
    regex,
)
from support.models.tiny_tokenizer import byte_tokenizer
from support.sampling.constraints import at, ids
from support.sampling.schemas import SCHEMAS, Schema, fits, values

DEMO = load(Path(demo_models()["dense"]))
BYTES = byte_tokenizer()
TOKENIZERS = st.sampled_from([DEMO, BYTES])
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["new", "né"]}, "maxItems": 2},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}


def text_of(tokenizer: Any, tokens: list[int]) -> str:
    decoded: str = tokenizer.decode(tokens)
    return decoded


def walk(grammar: Grammar, seed: int, limit: int = 400) -> tuple[list[int], bool]:
    """Return the tokens of a random walk, and whether it ended at a permitted end."""
    state, chance = grammar.begin(), random.Random(seed)
    tokens: list[int] = []
    while len(tokens) < limit:
        allowed = ids(state)
        if state.may_end and (not allowed or chance.random() < 0.3):
            return tokens, True
        if not allowed:
            break
        tokens.append(chance.choice(allowed))
        state.advance(tokens[-1])
    return tokens, False


@given(schema=SCHEMAS, tokenizer=TOKENIZERS, seed=st.integers(0, 2**32))
def test_every_walk_writes_json_that_fits_the_schema(
    schema: Schema, tokenizer: Any, seed: int
) -> None:
    tokens, ended = walk(json_schema(schema, tokenizer, compact=True), seed)
    assert ended
    assert fits(schema, json.loads(text_of(tokenizer, tokens)))


@given(data=st.data(), schema=SCHEMAS, tokenizer=TOKENIZERS, compact=st.booleans())
def test_every_value_that_fits_can_be_written(
    data: st.DataObject, schema: Schema, tokenizer: Any, compact: bool
) -> None:
    value = data.draw(values(schema))
    assert fits(schema, value)
    separators = (
        (",", ":")
        if compact
        else data.draw(st.sampled_from([(", ", ": "), ("  ,\n", "\t: ")]))
    )
    text = json.dumps(value, ensure_ascii=False, separators=separators)
    state = json_schema(schema, tokenizer, compact=compact).begin()
    for token in tokenizer.encode(text):
        assert token in ids(state)
        state.advance(token)
    assert state.may_end


@given(schema=SCHEMAS, tokenizer=TOKENIZERS, seed=st.integers(0, 2**32))
@settings(max_examples=50)
def test_a_fork_stands_where_its_parent_does_and_goes_its_own_way(
    schema: Schema, tokenizer: Any, seed: int
) -> None:
    grammar = json_schema(schema, tokenizer)
    tokens, _ = walk(grammar, seed, limit=20)
    cut = seed % (len(tokens) + 1)
    parent = at(grammar, tokens[:cut])
    fork = parent.fork()
    for token in tokens[cut:]:
        fork.advance(token)
    for state, path in ((fork, tokens), (parent, tokens[:cut])):
        fresh = at(grammar, path)
        assert np.array_equal(state.allowed(), fresh.allowed())
        assert state.may_end == fresh.may_end


@given(schema=SCHEMAS, tokenizer=TOKENIZERS, seed=st.integers(0, 2**32))
@settings(max_examples=15)
def test_what_is_allowed_is_what_advances(
    schema: Schema, tokenizer: Any, seed: int
) -> None:
    grammar = json_schema(schema, tokenizer)
    tokens, _ = walk(grammar, seed, limit=seed % 12)
    state = at(grammar, tokens)
    mask = state.allowed()
    assert mask.dtype == np.bool_
    assert len(mask) == len(tokenizer.get_vocab())
    some = random.Random(seed).sample(range(len(mask)), 40)
    for token in {*some, *np.flatnonzero(mask).tolist()[:40], -1, len(mask), 10**9}:
        fork = state.fork()
        if 0 <= token < len(mask) and mask[token]:
            fork.advance(token)
            continue
        with pytest.raises(ConstraintError, match=f"Token {token} is not allowed"):
            fork.advance(token)
        assert np.array_equal(fork.allowed(), mask)
    assert np.array_equal(state.allowed(), mask)


@pytest.mark.parametrize("tokenizer", [DEMO, BYTES, DEMO._tokenizer])
def test_a_regular_expression_is_matched_as_a_whole(tokenizer: Any) -> None:
    grammar = regex("(yes|no)( [0-9]{1,2})?", tokenizer)
    for text, ends in {"yes": True, "no 1": True, "no 12": True, "no ": False}.items():
        state = at(grammar, tokenizer.encode(text))
        assert state.may_end == ends
        assert any(ids(state)) == (text != "no 12")
    for seed in range(10):
        text = text_of(tokenizer, walk(grammar, seed)[0])
        assert text.split(" ")[0] in ("yes", "no")
    with pytest.raises(ConstraintError):
        at(grammar, tokenizer.encode("yess"))


def test_a_lark_grammar_may_be_recursive() -> None:
    grammar = lark('start: "(" start ")" | /[0-9]/', BYTES)
    assert at(grammar, BYTES.encode("((((7))))")).may_end
    assert not at(grammar, BYTES.encode("((((7)))")).may_end
    with pytest.raises(ConstraintError):
        at(grammar, BYTES.encode("(7))"))


def test_no_token_of_its_own_ends_the_text() -> None:
    """Neither the tokenizer's end-of-text id nor the library's ends the text."""
    end = DEMO.eos_token_id
    for grammar, text in ((regex("a*", DEMO), "a"), (regex("a", DEMO), "a")):
        state = at(grammar, DEMO.encode(text))
        assert state.may_end
        assert len(state.allowed()) == len(DEMO.get_vocab())
        assert not state.allowed()[end]
        for token in (end, len(DEMO.get_vocab())):
            with pytest.raises(ConstraintError):
                state.fork().advance(token)


def test_the_text_of_an_empty_grammar_may_end_at_once() -> None:
    state = regex("", BYTES).begin()
    assert state.may_end
    assert ids(state) == []


def test_a_schema_may_be_text_or_true() -> None:
    for schema in (json.dumps({"enum": [[1]]}), {"enum": [[1]]}):
        grammar = json_schema(schema, BYTES, compact=True)
        assert at(grammar, BYTES.encode("[1]")).may_end
    assert at(json_schema(True, BYTES), BYTES.encode('{"any": [null, 1e5]}')).may_end


def test_whitespace_is_refused_where_it_is_compact() -> None:
    state = json_schema(PERSON, BYTES, compact=True).begin()
    assert [chr(c) for c in BYTES.decode(ids(state)).encode()] == ["{"]
    assert len(ids(json_schema(PERSON, BYTES).begin())) == 1
    spaced = at(json_schema(PERSON, BYTES), BYTES.encode("{"))
    assert len(ids(spaced)) == 5  # a quote and four kinds of whitespace


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: json_schema("{", BYTES), r"schema is not JSON \(.* It is: '\{'"),
        (lambda: json_schema("[1]", BYTES), "schema is not JSON"),
        (lambda: json_schema({"enum": [{1}]}, BYTES), "schema is not JSON"),
        (lambda: json_schema({"type": "foo"}, BYTES), "Invalid type: foo"),
        (lambda: json_schema({"not": {}}, BYTES), "Unimplemented keys"),
        (lambda: json_schema(False, BYTES), "cannot be used"),
        (
            lambda: json_schema({"if": {}, "x-guidance": {"lenient": True}}, BYTES),
            r"would not be enforced: Unimplemented keys: \[\"if\"\]",
        ),
        (lambda: regex("(a", BYTES), "unclosed group"),
        (lambda: regex("a(?=b)", BYTES), "look-ahead"),
        (lambda: lark("start: x", BYTES), "unknown name"),
        (lambda: regex("a", object()), "tokenizer is a object, and a fast one"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(make: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        make()


def test_without_the_library_the_error_tells_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for make in (json_schema, regex, lark):
        with pytest.raises(MissingLibraryError, match=r"pip install .*\[grammar\]"):
            make("true", BYTES)


def test_a_grammar_that_hits_a_limit_fails_and_does_not_end_the_text() -> None:
    """At a limit the library's mask allows only the end."""
    state = regex("((a{0,300}b{0,300}){0,300}c?){0,300}", BYTES).begin()
    chance = random.Random(0)

    def go_on() -> None:
        for _ in range(200):
            state.allowed()
            state.advance(BYTES.encode(chance.choice("ab"))[0])

    with pytest.raises(ConstraintError, match=r"^The grammar failed here: .*\.$"):
        go_on()
    with pytest.raises(ConstraintError, match="failed here: lexer error"):
        state.fork().allowed()


def test_a_tokenizer_is_read_once_until_it_grows() -> None:
    tokenizer = byte_tokenizer()
    fast = tokenizer._tokenizer
    first = regex("b+", tokenizer)
    read = llguidance._READ[fast]
    assert regex("b", fast)._vocabulary is read
    fast.add_tokens(["bbb"])
    second = regex("b+", tokenizer)
    assert len(first.begin().allowed()) == 256
    assert ids(second.begin())[-1] == 256
    assert fast.get_vocab().keys().isdisjoint({llguidance.END})
    before = len(llguidance._READ)
    del tokenizer, fast, first, second
    gc.collect()
    assert len(llguidance._READ) == before - 1


def test_padding_and_truncation_of_a_tokenizer_do_not_count() -> None:
    fast = byte_tokenizer()._tokenizer
    fast.backend_tokenizer.enable_truncation(2)
    fast.backend_tokenizer.enable_padding(length=20)
    read = regex("abc", fast)._vocabulary.tokens
    assert len(read.tokenize_str("abcdefg")) == 7
    assert fast.backend_tokenizer.truncation is not None


def fast_tokenizer(model: Any, decoder: Any, **special: str) -> Any:
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoder
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def test_a_tokenizer_with_byte_fallback_is_read() -> None:
    pieces = ["<unk>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "▁a"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    model = models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", byte_fallback=True)
    decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer = fast_tokenizer(model, decoder, eos_token="</s>", unk_token="<unk>")
    allowed = [pieces[i] for i in ids(regex("[ aé]+", tokenizer).begin())]
    assert allowed == ["<0x20>", "<0x61>", "<0xC3>", "▁", "a", "▁a"]


def test_tokenizers_that_would_be_misread_are_refused() -> None:
    model = models.BPE({"a": 0, "b": 2}, [])
    gaps = fast_tokenizer(model, decoders.ByteLevel())
    with pytest.raises(InvalidRequestError, match="2 ids and the largest is 2"):
        regex("a", gaps)
    words = fast_tokenizer(models.WordLevel({"a": 0}, "a"), decoders.WordPiece())
    with pytest.raises(InvalidRequestError, match="cannot read the tokenizer"):
        regex("a", words)


def test_generations_may_run_in_threads_at_once() -> None:
    grammar = json_schema(PERSON, DEMO, compact=True)
    expected = [walk(grammar, seed) for seed in range(200)]
    with ThreadPoolExecutor(4) as threads:
        walks = list(threads.map(lambda seed: walk(grammar, seed), range(200)))
    assert walks == expected


def test_grammars_are_constraints_and_serve_many_generations() -> None:
    grammar = regex("ab", BYTES)
    assert isinstance(grammar, Constraint)
    assert isinstance(grammar.begin(), ConstraintState)
    first, second = grammar.begin(), grammar.begin()
    assert isinstance(first, GrammarState)
    first.advance(BYTES.encode("a")[0])
    assert BYTES.decode(ids(first)) == "b"
    assert BYTES.decode(ids(second)) == "a"

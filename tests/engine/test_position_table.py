"""No forward reaches past the last row of a table of positions.

mlx does not check indices: what stands behind the table is read, and one NaN there
ended texts that plain decoding finishes. The tables here are followed by rows of NaN.
"""

import functools
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation import (
    ContextLengthNotice,
    InvalidRequestError,
    SpeculativeGenerator,
    stream_generate,
)
from mlx_speculation.models import context_length, position_table
from support.drafters.scripted_drafter import ScriptedDrafter
from support.identity import GREEDY, SAMPLED, plain_text, prompt_of
from support.models import census, tiny_models
from support.models.tiny_tokenizer import byte_tokenizer

ROWS = 32
TABLES = {"gpt2": "model.wpe", "gpt_bigcode": "transformer.wpe"}


class Watched(nn.Embedding):
    """An embedding that notes the largest row that it is asked for."""

    def __call__(self, indices: mx.array) -> mx.array:
        self.asked.append(int(indices.max()))
        rows: mx.array = self.weight[indices]
        return rows


@functools.cache
def made(name: str, rows: int = ROWS) -> Any:
    """Return a model whose table is cut to so many rows, and watched."""
    model: Any = census.build(name)
    owner, field = TABLES[name].split(".")
    table = model[owner][field]
    weight = mx.random.normal((rows, table.weight.shape[1]), key=mx.random.key(3))
    table.weight = weight * 0.3
    table.__class__ = Watched
    table.asked = []
    mx.eval(model.parameters())
    return model


def asked(model: Any) -> list[int]:
    """Return the rows that were asked for since the last call."""
    found = next(m.asked for _, m in model.named_modules() if isinstance(m, Watched))
    rows = list(found)
    found.clear()
    return rows


pytestmark = pytest.mark.filterwarnings("ignore::mlx_speculation.ContextLengthNotice")


@functools.cache
def known(name: str, length: int) -> list[int]:
    """Return a prompt and mlx-lm's text behind it, to the end of the table."""
    prompt = prompt_of(length)
    text = [*prompt, *plain_text(made(name), prompt, ROWS - length)]
    asked(made(name))
    return text


@pytest.mark.parametrize("name", TABLES)
def test_the_table_is_found(name: str) -> None:
    assert position_table(made(name)) == ROWS
    assert SpeculativeGenerator(made(name), byte_tokenizer()).context_length == ROWS
    for other in ("llama", "gptj", "gemma3n", "longcat_flash_ngram"):
        assert position_table(census.structure(other)) is None


@given(
    name=st.sampled_from(list(TABLES)),
    length=st.integers(1, ROWS),
    draft=st.integers(0, 9),
    right=st.sampled_from([0.0, 0.6, 1.0]),
    ragged=st.booleans(),
    sampled=st.booleans(),
)
@settings(deadline=None)
def test_no_draft_leaves_the_table(
    name: str, length: int, draft: int, right: float, ragged: bool, sampled: bool
) -> None:
    model, text = made(name), known(name, length)
    sampling = SAMPLED if sampled else GREEDY
    drafter = ScriptedDrafter(text, right=right, ragged=ragged)
    generator = SpeculativeGenerator(model, byte_tokenizer(), draft=drafter)
    plain = SpeculativeGenerator(model, byte_tokenizer())
    options: dict[str, Any] = {
        "max_tokens": 60,
        "stop_tokens": (),
        "sampling": sampling,
    }
    asked(model)
    drafted = generator.generate(text[:length], draft_length=draft, **options)
    reference = plain.generate(text[:length], **options)
    assert max(asked(model), default=0) < ROWS
    assert drafted.tokens == reference.tokens
    assert drafted.finish_reason == reference.finish_reason == "length"
    assert length + len(drafted.tokens) == ROWS
    if not sampled:
        assert drafted.tokens == text[length:]


def test_the_end_is_said_and_a_longer_prompt_refused() -> None:
    generator = SpeculativeGenerator(made("gpt2"), byte_tokenizer(), draft="lookup")
    with pytest.warns(ContextLengthNotice, match="table of positions"):
        generator.generate(prompt_of(28), max_tokens=10, stop_tokens=())
    result = generator.generate(prompt_of(28), max_tokens=4, stop_tokens=())
    assert len(result.tokens) == 4
    asked(made("gpt2"))
    wanted = r"33 tokens, and the model a table of 32 positions"
    with pytest.raises(InvalidRequestError, match=wanted):
        generator.stream(prompt_of(33))
    held = made("gpt2").make_cache() if hasattr(made("gpt2"), "make_cache") else None
    assert held is None
    assert asked(made("gpt2")) == []


def test_what_passed_caches_hold_counts() -> None:
    model = made("gpt2")
    generator = SpeculativeGenerator(model, byte_tokenizer())
    caches = make_prompt_cache(model)
    generator.generate(prompt_of(20), max_tokens=4, stop_tokens=(), prompt_cache=caches)
    with pytest.raises(InvalidRequestError, match=r"has 33 tokens"):
        generator.stream(prompt_of(9), prompt_cache=caches)
    asked(model)
    result = generator.generate(
        prompt_of(4), max_tokens=9, stop_tokens=(), prompt_cache=caches
    )
    assert len(result.tokens) == 4
    assert caches[0].offset == ROWS
    assert max(asked(model)) < ROWS


@pytest.mark.parametrize("rows", [20, 30])
def test_a_draft_model_pauses_at_its_own_end(rows: int) -> None:
    target = tiny_models.build("llama")
    draft = made("gpt2", rows)
    tokenizer = byte_tokenizer()
    for length in (10, rows - 1, rows + 5):
        prompt = prompt_of(length)
        generator = SpeculativeGenerator(target, tokenizer, draft=draft, draft_length=4)
        asked(draft)
        result = generator.generate(prompt, max_tokens=40, stop_tokens=())
        assert max(asked(draft), default=0) < rows
        assert result.tokens == plain_text(target, prompt, 40)
        assert bool(result.stats.drafted) == (length < rows)
        assert result.stats.drafter_faults == []
        batch = generator.generate_batch(
            [prompt, prompt_of(6)], max_tokens=40, stop_tokens=()
        )
        assert max(asked(draft), default=0) < rows
        assert batch[0].tokens == result.tokens


def test_rows_of_a_batch_stay_within_the_table() -> None:
    """A row near the end is fed as many positions as the widest draft has."""
    model = made("gpt2")
    lengths = (28, 9, 20)
    texts = {n: known("gpt2", n) for n in lengths}
    draft = tiny_models.build("llama", seed=1)
    generator = SpeculativeGenerator(
        model, byte_tokenizer(), draft=draft, draft_length=8
    )
    asked(model)
    results = generator.generate_batch(
        [texts[n][:n] for n in lengths], max_tokens=60, stop_tokens=()
    )
    assert max(asked(model)) < ROWS
    for n, result in zip(lengths, results, strict=True):
        assert result.tokens == texts[n][n:]
        assert result.finish_reason == "length"


def test_a_draft_that_is_kept_level_stays_within_its_table() -> None:
    target, draft = tiny_models.build("llama"), made("gpt2", 30)
    caches = [*make_prompt_cache(target), *make_prompt_cache(draft)]
    asked(draft)
    options: dict[str, Any] = {"draft_model": draft, "prompt_cache": caches}
    tokens = [
        response.token
        for response in stream_generate(
            target, byte_tokenizer(), prompt_of(20), max_tokens=40, **options
        )
    ]
    assert len(tokens) == 40
    assert max(asked(draft)) < 30


def test_exact_mode_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="table of 32 positions"):
        SpeculativeGenerator(made("gpt2"), byte_tokenizer(), exact=True)


def test_the_drop_in_ends_there_too() -> None:
    text = known("gpt2", 28)
    responses = list(
        stream_generate(made("gpt2"), byte_tokenizer(), text[:28], max_tokens=20)
    )
    assert [each.token for each in responses] == text[28:]
    assert responses[-1].finish_reason == "length"


def test_other_names_and_defaults_of_lengths_are_known() -> None:
    assert context_length(census.structure("gptj")) is not None
    phi = census.structure("phi")
    phi.args.max_position_embeddings = 2048  # also the default of its class
    assert context_length(phi) == 2048

"""Every architecture of mlx-lm gets plain decoding's text, whatever the draft.

By default one prompt longer than the window, a draft that is right at random, and one
of both temperatures in turn; the whole grid is marked slow. The
twenty of tiny_models.json have a grid in test_identity.py anyway.

Faults that were made by hand, and found here:
    a part of a round's rows is kept one row short, in KVCache
    a round's rows see one row more than a ring holds (plamo3)
    a prompt's rows see one row less than the model asks for (plamo3)
    phi3small is given drafts
    a module is in no table, or under another name
    the error of what cannot be built is another one
"""

import contextlib
import io
from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation import PrefixCache, SpeculativeGenerator
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models.exclusions import DEPEND_ON_CUTS
from support.covering import covering
from support.identity import (
    GREEDY,
    ROUNDING,
    SAMPLED,
    check_identity,
    plain_text,
    prompt_of,
)
from support.models import census
from support.models.census import BUILT, NOT_BUILT
from support.models.recurrent_models import RUN_AGAIN
from support.models.tiny_tokenizer import byte_tokenizer

TOKENS = 30
PROMPT = 40  # longer than every window
LONG_PROMPTS = {6: 4, 17: 3, 40: 5}  # tokens: draft length

SAMPLINGS = {"greedy": GREEDY, "sampled": SAMPLED}

UNEQUAL = [name for name, row in BUILT.items() if row.unequal]
OWN = [name for name, row in BUILT.items() if not (row.tiny or row.unequal)]


# Rings and states may see a row or not by where a prompt is cut; rows alone do not.
CUT = sorted(n for n in BUILT if BUILT[n].caches.split(" ", 1)[-1] != "KVCache")


def test_every_module_of_mlx_lm_is_in_one_table() -> None:
    found, broken = census.architectures()
    assert not BUILT.keys() & NOT_BUILT.keys()
    assert found | broken == BUILT.keys() | NOT_BUILT.keys()
    assert broken == {name for name, row in NOT_BUILT.items() if row.args is None}


@pytest.mark.parametrize("name", BUILT)
def test_an_architecture_is_as_the_table_says(name: str) -> None:
    row, model, prompt = BUILT[name], census.build(name), prompt_of(PROMPT)
    assert census.cache_kinds(model) == row.caches
    assert census.layers(model) == row.layers
    assert census.window(model) == row.window
    text = plain_text(model, prompt, 24)
    assert len(set(text)) >= 5
    logits = model(mx.array([prompt + text]))
    assert logits.dtype == mx.float32
    assert bool(mx.isfinite(logits[..., :256]).all())
    difference = census.widths_differ(model, prompt, text)
    assert (difference == 0) == row.bitwise
    assert (difference < ROUNDING) == (row.unequal is None)


@pytest.mark.parametrize(("name", "chosen"), covering(OWN, SAMPLINGS))
def test_a_draft_leaves_the_text_of_every_architecture(name: str, chosen: str) -> None:
    seen = check_identity(
        census.build(name),
        prompt_of(PROMPT),
        draft_length=3,
        tokens=TOKENS,
        bitwise=BUILT[name].bitwise,
        kinds=["random"],
        samplings=[SAMPLINGS[chosen]],
    )
    assert seen.rejected >= 2
    assert seen.reruns == 0
    assert (seen.mixer_reruns > 0) == (name in (*RUN_AGAIN, "deepseek_v41"))


@pytest.mark.slow
@pytest.mark.parametrize("length", LONG_PROMPTS)
@pytest.mark.parametrize("name", OWN)
def test_any_draft_leaves_the_long_text_of_every_architecture(
    name: str, length: int
) -> None:
    seen = check_identity(
        census.build(name),
        prompt_of(length),
        draft_length=LONG_PROMPTS[length],
        tokens=120,
        bitwise=BUILT[name].bitwise,
    )
    assert seen.texts == 6
    assert seen.reruns == 0


@pytest.mark.parametrize("name", UNEQUAL)
def test_a_model_that_cannot_check_drafts_is_decoded_without(name: str) -> None:
    model, prompt = census.build(name), prompt_of(PROMPT)
    with pytest.raises(InvalidRequestError, match=f"{name} cannot use one"):
        SpeculativeGenerator(model, byte_tokenizer(), draft=census.build("llama"))
    with pytest.raises(InvalidRequestError, match=f"{name} cannot use one"):
        SpeculativeGenerator(
            model, byte_tokenizer(), prefix_cache=PrefixCache(max_bytes=1)
        )
    plain = SpeculativeGenerator(model, byte_tokenizer())
    text = plain.generate(prompt, max_tokens=12).tokens
    assert text == plain_text(model, prompt, 12)


@pytest.mark.parametrize("name", CUT)
def test_rows_do_not_depend_on_where_a_prompt_is_cut(name: str) -> None:
    model, prompt = census.build(name), prompt_of(61)

    def fed(*cuts: int) -> mx.array:
        caches, rows = make_prompt_cache(model), []
        for start, stop in pairwise((0, *cuts, len(prompt))):
            rows.append(model(mx.array([prompt[start:stop]]), cache=caches)[0])
        return mx.concatenate(rows)

    whole, ways = fed(), ((30,), (16, 32, 48), (23, 45))
    gaps: list[Any] = [mx.abs(whole - fed(*cuts)).max().item() for cuts in ways]
    found = max(gaps)
    module = f"mlx_lm.models.{name}"
    assert (found > ROUNDING) == (module in DEPEND_ON_CUTS), found


@pytest.mark.parametrize("module", DEPEND_ON_CUTS)
def test_a_model_that_depends_on_cuts_takes_no_prefix_cache(module: str) -> None:
    model = census.build(module.rpartition(".")[-1])
    with pytest.raises(InvalidRequestError, match=f"prefix_cache.*{module}.*is cut"):
        SpeculativeGenerator(
            model, byte_tokenizer(), prefix_cache=PrefixCache(max_bytes=1)
        )


@pytest.mark.parametrize("name", NOT_BUILT)
def test_what_cannot_be_built_says_why(name: str) -> None:
    row, printed = NOT_BUILT[name], io.StringIO()

    def run() -> None:
        model = census.build_from(name, row.args or {})
        mx.eval(model(mx.array([[1, 2]]), cache=make_prompt_cache(model)))

    # One of them prints what is missing, and exits.
    with (
        contextlib.redirect_stdout(printed),
        pytest.raises((Exception, SystemExit)) as error,
    ):
        run()
    assert row.error in f"{error.value} {printed.getvalue()}"

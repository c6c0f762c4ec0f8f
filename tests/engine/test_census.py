"""Every architecture of mlx-lm is as the census table says."""

import contextlib
import io
from functools import cache
from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation import PrefixCache, SpeculativeGenerator
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models.exclusions import DEPEND_ON_CUTS
from support.covering import others_slow
from support.each import each
from support.identity import (
    ROUNDING,
    plain_text,
    prompt_of,
)
from support.models import census
from support.models.census import BUILT, NOT_BUILT
from support.models.tiny_tokenizer import byte_tokenizer

PROMPT = 40  # longer than every window


UNEQUAL = [name for name, row in BUILT.items() if row.unequal]


# For rings and states it can matter where a prompt is cut; for plain rows it does not.
CUT = sorted(n for n in BUILT if BUILT[n].caches.split(" ", 1)[-1] != "KVCache")


@cache
def kinds() -> set[frozenset[str]]:
    return {census.kind_of(census.structure(name)) for name in census.EACH_KIND}


def test_every_module_of_mlx_lm_is_in_one_table() -> None:
    modules, broken = census.architectures()
    assert not BUILT.keys() & NOT_BUILT.keys()
    assert modules | broken == BUILT.keys() | NOT_BUILT.keys()
    assert broken == {name for name, row in NOT_BUILT.items() if row.args is None}


@each(name=BUILT)
def test_an_architecture_has_the_caches_and_layers_of_the_table(name: str) -> None:
    row, model = BUILT[name], census.structure(name)
    assert census.cache_kinds(model) == row.caches
    assert census.layers(model) == row.layers
    assert census.window(model) == row.window
    assert census.kind_of(model) in kinds()


@pytest.mark.parametrize("name", others_slow(BUILT, [*census.EACH_KIND, *UNEQUAL]))
def test_the_rows_of_an_architecture_are_as_the_table_says(name: str) -> None:
    """test_text_is_unchanged.py relies on what the table says of rows."""
    row, model, prompt = BUILT[name], census.build(name), prompt_of(PROMPT)
    text = plain_text(model, prompt, 12)
    assert len(set(text)) >= 4
    logits = model(mx.array([prompt + text]))
    assert logits.dtype == mx.float32
    assert bool(mx.isfinite(logits[..., :256]).all())
    difference = census.widths_differ(model, prompt, text)
    assert (difference == 0) == row.bitwise
    assert (difference < ROUNDING) == (row.unequal is None)


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


@pytest.mark.parametrize("name", others_slow(CUT, census.EACH_KIND))
def test_rows_do_not_depend_on_where_a_prompt_is_cut(name: str) -> None:
    model, prompt = census.build(name), prompt_of(61)

    def fed(*cuts: int) -> mx.array:
        caches, rows = make_prompt_cache(model), []
        for start, stop in pairwise((0, *cuts, len(prompt))):
            rows.append(model(mx.array([prompt[start:stop]]), cache=caches)[0])
        return mx.concatenate(rows)

    whole, ways = fed(), ((30,), (16, 32, 48), (23, 45))
    gaps: list[Any] = [mx.abs(whole - fed(*cuts)).max().item() for cuts in ways]
    largest = max(gaps)
    module = f"mlx_lm.models.{name}"
    assert (largest > ROUNDING) == (module in DEPEND_ON_CUTS), largest


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

    # One module prints the missing package, and exits.
    with (
        contextlib.redirect_stdout(printed),
        pytest.raises((Exception, SystemExit)) as error,
    ):
        run()
    assert row.error in f"{error.value} {printed.getvalue()}"

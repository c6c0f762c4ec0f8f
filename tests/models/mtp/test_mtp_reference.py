"""MTP heads of every family, compared with references.

The references compute in numpy, except for the blocks: these are layers of
transformers, or of mlx-lm if transformers has none.
"""

import dataclasses
from typing import Literal

import pytest

from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models import MtpConvention
from mlx_speculation.models.checkpoints.draft_head import HeadOutput
from support.drafters.mtp_bench import (
    SLOTS,
    Bench,
    MakeBench,
    assert_close,
    ids,
    make_bench,
    states,
)
from support.each import each
from support.models.mtp_checkpoints import read_mtp_head
from support.references.mtp.base import MtpRows
from support.references.mtp.families import FAMILIES

STATES: tuple[Literal["after_norm", "before_norm"], ...] = ("after_norm", "before_norm")
ORDERS: tuple[Literal["embedding_first", "hidden_first"], ...] = (
    "embedding_first",
    "hidden_first",
)
NORMS: tuple[Literal["stored", "plus_one"], ...] = ("stored", "plus_one")


@pytest.fixture(name="bench", scope="module")
def _bench(tmp_path_factory: pytest.TempPathFactory) -> MakeBench:
    made: dict[str, Bench] = {}

    def make(name: str) -> Bench:
        if name not in made:
            path = tmp_path_factory.mktemp(name)
            made[name] = make_bench(path, FAMILIES[name])
        return made[name]

    return make


def assert_same(ours: HeadOutput, theirs: MtpRows, start: int, stop: int) -> None:
    """Compare the output of slots [start, stop) with the reference of all slots."""
    assert_close(ours.logits, theirs.logits[start:stop])
    assert_close(ours.recycled, theirs.recycled[start:stop])


@each(name=FAMILIES)
def test_a_family_has_the_convention_of_the_facts(bench: MakeBench, name: str) -> None:
    family, folder = bench(name).family, bench(name).folder
    head = read_mtp_head(folder.path, folder.model)
    assert head.convention == MtpConvention(
        hidden=family.state,
        recycled=family.recycles,
        order="hidden_first" if family.hidden_first else "embedding_first",
        norms="plus_one" if family.plus_one else "stored",
    )
    assert len(head.new_caches()) == (family.used or family.layers)
    # A chain drafts one token per layer. MiMo's layer drafts one token; the layers of
    # other families draft any number.
    once = 1 if name == "mimo" else None
    assert head.depth == (family.layers if family.chains else once)


@each(name=FAMILIES, pieces=[[SLOTS], [4, 1, 1, 5]])
def test_all_layers_equal_the_reference_over_the_whole_history(
    bench: MakeBench, name: str, pieces: list[int]
) -> None:
    here = bench(name)
    mtp, hidden = here.load(), here.hidden
    for layer, caches in enumerate(mtp.head.new_caches()):
        tokens = here.tokens[layer : layer + SLOTS]
        expected = here.expected(hidden, tokens, layer)
        start = 0
        for size in pieces:
            stop = start + size
            part = states(hidden[start:stop]), ids(tokens[start:stop])
            assert_same(mtp.rows(*part, caches, layer=layer), expected, start, stop)
            start = stop
        hidden = expected.recycled


@each(name=FAMILIES)
def test_a_slot_after_history_rows_equals_the_reference(
    bench: MakeBench, name: str
) -> None:
    here = bench(name)
    mtp, hidden = here.load(), here.hidden
    for layer, caches in enumerate(mtp.head.new_caches()):
        tokens = here.tokens[layer : layer + SLOTS]
        expected = here.expected(hidden, tokens, layer)
        mtp.history(states(hidden[:6]), ids(tokens[:6]), caches, layer=layer)
        out = mtp.step(states(hidden[6:9]), ids(tokens[6:9]), caches, layer=layer)
        assert_same(out, expected, 8, 9)
        hidden = expected.recycled


CONVENTIONS = [
    MtpConvention(recycled=recycled, order=order, norms=norms)
    for recycled in STATES
    for order in ORDERS
    for norms in NORMS
]


@each(
    name=["qwen3_5", "deepseek_v3", "mimo", "ernie", "step3p5"], convention=CONVENTIONS
)
def test_a_named_convention_equals_the_reference_with_it(
    bench: MakeBench, name: str, convention: MtpConvention
) -> None:
    here = bench(name)
    if convention.norms == "plus_one" and not here.family.plus_one:
        with pytest.raises(ModelFolderError, match="Leave norms out"):
            here.load(convention)
        return
    family = dataclasses.replace(
        here.family,
        recycles=convention.recycled,
        hidden_first=convention.order == "hidden_first",
        plus_one=convention.norms == "plus_one",
    )
    tokens = here.tokens[:SLOTS]
    expected = dataclasses.replace(here, family=family).expected(here.hidden, tokens)
    mtp = here.load(convention)
    caches = mtp.head.new_caches()[0]
    out = mtp.rows(states(here.hidden), ids(tokens), caches)
    assert_same(out, expected, 0, SLOTS)

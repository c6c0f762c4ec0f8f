"""The property of test_twins.py for rarer kinds, and for several kinds in one model."""

from collections.abc import Callable, Iterator

import pytest
from hypothesis import strategies as st

from mlx_speculation.models import ModelHooks
from support.caches.cache_twins import ArraysKind, Kind, KVKind, Mixers
from support.caches.rare_cache_twins import (
    ConcatenateKind,
    LayerKind,
    attentions,
    chunked_kinds,
    compositions,
    quantized_kinds,
)
from support.caches.twin_rounds import FEWER, SMALL_RINGS, run


@pytest.fixture(name="compressing", scope="module")
def _compressing() -> Iterator[st.SearchStrategy[Kind]]:
    modules = attentions()
    owners = [ModelHooks(module) for module in modules]
    yield st.builds(LayerKind, st.sampled_from(modules), st.integers(1, 12))
    for owner in owners:
        owner.remove()


def test_a_quantized_cache_equals_its_twin(note_rounds: Callable[[int], None]) -> None:
    note_rounds(run(quantized_kinds, share=0.2, rarely=True))


def test_a_concatenated_cache_equals_its_twin(
    note_rounds: Callable[[int], None],
) -> None:
    note_rounds(run(st.builds(ConcatenateKind), share=0.2, rarely=True))


def test_a_chunked_cache_equals_its_twin(note_rounds: Callable[[int], None]) -> None:
    note_rounds(run(chunked_kinds, share=0.2))


def test_a_compressing_layer_equals_its_twin(
    compressing: st.SearchStrategy[Kind], note_rounds: Callable[[int], None]
) -> None:
    note_rounds(run(compressing, share=0.2, rarely=True))


def test_any_caches_that_move_together_equal_their_twins(
    compressing: st.SearchStrategy[Kind],
    hooked: dict[str, Mixers],
    note_rounds: Callable[[int], None],
) -> None:
    kinds = compositions(
        [
            st.sampled_from([4, 256]).map(KVKind),
            SMALL_RINGS,
            st.just(ArraysKind(hooked["lfm2"])),
            quantized_kinds,
            st.builds(ConcatenateKind),
            chunked_kinds,
            compressing,
        ]
    )
    note_rounds(run(kinds, widths=FEWER, share=0.2, steps=25, rarely=True))

"""A cache after any rounds equals a native twin that saw only the kept tokens.

Hypothesis draws forwards, then a commit of any prefix, a rollback, an exception, or
another ending. The views of a round are compared with those of a native copy. A third
of the rounds are isolated, and must not write to live caches before the commit.
"""

from collections.abc import Callable

import pytest
from hypothesis import strategies as st

from mlx_speculation.caches.journals import ring
from support.caches.cache_twins import ArraysKind, KVKind, ListKind, Mixers, ring_kinds
from support.caches.twin_rounds import (
    FEWER,
    MANY_SINGLE_ROWS,
    SINGLE_ROWS,
    SMALL_RINGS,
    WIDTHS,
    run,
)


def test_a_kv_cache_equals_its_twin(note_rounds: Callable[[int], None]) -> None:
    note_rounds(run(st.sampled_from([1, 4, 8, 256]).map(KVKind), rarely=True))


@pytest.mark.parametrize("saved_rows", [1, 3, 64])
def test_a_small_ring_equals_its_twin(
    saved_rows: int,
    monkeypatch: pytest.MonkeyPatch,
    note_rounds: Callable[[int], None],
) -> None:
    monkeypatch.setattr(ring, "SAVED_ROWS", saved_rows)
    note_rounds(run(SMALL_RINGS, share=0.2))


def test_a_small_ring_that_fills_row_by_row_equals_its_twin(
    monkeypatch: pytest.MonkeyPatch, note_rounds: Callable[[int], None]
) -> None:
    """Each ring gets few rounds, since the hard cases are where it first wraps."""
    monkeypatch.setattr(ring, "SAVED_ROWS", 3)
    rings = ring_kinds(st.integers(2, 6), st.integers(0, 1))
    prefills = st.integers(0, 6).map(lambda count: [1] * count)
    note_rounds(run(rings, widths=SINGLE_ROWS, prefills=prefills, share=0.8, steps=8))


def test_a_ring_wider_than_its_saved_rows_equals_its_twin(
    note_rounds: Callable[[int], None],
) -> None:
    rings = ring_kinds(st.integers(65, 140), st.integers(0, 4))
    prefills = st.lists(st.integers(1, 200), min_size=1, max_size=2)
    widths = st.one_of(MANY_SINGLE_ROWS, WIDTHS)
    note_rounds(run(rings, widths=widths, prefills=prefills, share=0.2))


@pytest.mark.parametrize(
    ("name", "share"), [("lfm2", 0.7), ("qwen3_5", 0.1), ("mamba", 0.1), ("rwkv7", 0.1)]
)
def test_a_recurrent_state_equals_its_twin(
    name: str,
    share: float,
    hooked: dict[str, Mixers],
    note_rounds: Callable[[int], None],
) -> None:
    takes_lengths = name in ("lfm2", "qwen3_5")
    extents = st.none() | st.just(2000) if takes_lengths else st.none()
    paddings = st.none() | st.integers(1, 5) if takes_lengths else st.none()
    kinds = st.builds(ArraysKind, st.just(hooked[name]), extents, paddings)
    note_rounds(
        run(
            kinds,
            prefills=st.lists(st.integers(1, 4), max_size=1),
            share=share,
            rarely=name == "lfm2",
        )
    )


def test_a_cache_list_equals_its_twin(
    hooked: dict[str, Mixers], note_rounds: Callable[[int], None]
) -> None:
    kinds = st.builds(
        lambda kv, ring: ListKind((kv, ArraysKind(hooked["lfm2"]), ring)),
        st.sampled_from([4, 256]).map(KVKind),
        SMALL_RINGS,
    )
    note_rounds(run(kinds, widths=FEWER, rarely=True))

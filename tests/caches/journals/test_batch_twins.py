"""Each row of a batch cache equals a single native cache that saw only its tokens.

Hypothesis draws rounds that keep a different prefix of each row, rounds that are
undone, plain forwards, and rows that leave and join. Each row is compared with its twin
in the forwards of a round, in forwards after it, and after `extract`.
"""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st

from mlx_speculation.caches.journals import ring
from support.caches.batch_rounds import (
    BEGINNINGS,
    SINGLE_ROWS,
    WIDTHS,
    Batch,
    drawn,
)
from support.caches.batch_twins import (
    AttentionKind,
    BatchArraysKind,
    RaggedKind,
    RaggedQuantizedKind,
)
from support.caches.cache_twins import Mixers
from support.caches.twin_rounds import played

ROUNDS = 600


def run(
    kinds: st.SearchStrategy[Any],
    *,
    widths: st.SearchStrategy[list[int]] = WIDTHS,
    share: float = 1.0,
    steps: int = 30,
    beginnings: tuple[str, ...] = BEGINNINGS,
) -> int:
    """Play `share * ROUNDS` rounds, scaled by the Hypothesis profile; see `played`."""

    machine = drawn(Batch, kinds, widths, beginnings)
    return played(machine, share * ROUNDS, steps)


def test_rows_of_a_batch_kv_cache_equal_their_twins(
    note_rounds: Callable[[int], None],
) -> None:
    kinds = st.sampled_from([4, 256]).map(lambda step: AttentionKind(step=step))
    note_rounds(run(kinds, share=0.25))


def test_rows_of_a_ragged_cache_equal_their_twins(
    note_rounds: Callable[[int], None],
) -> None:
    """The model can have a window that the cache does not know."""
    kinds = st.builds(
        RaggedKind, step=st.sampled_from([4, 256]), narrow=st.sampled_from([None, 5])
    )
    note_rounds(run(kinds, share=0.15, beginnings=("merged",)))


def test_rows_of_a_ragged_quantized_cache_equal_their_twins(
    note_rounds: Callable[[int], None],
) -> None:
    kinds = st.builds(
        RaggedQuantizedKind,
        step=st.sampled_from([4, 256]),
        narrow=st.sampled_from([None, 5]),
        bits=st.sampled_from([2, 4, 8]),
    )
    note_rounds(run(kinds, share=0.15, beginnings=("merged",)))


RINGS = st.builds(
    AttentionKind, window=st.integers(2, 12), step=st.sampled_from([3, 256])
)


@pytest.mark.parametrize("saved_rows", [1, 3, 64])
def test_rows_of_a_batch_ring_equal_their_twins(
    saved_rows: int, monkeypatch: pytest.MonkeyPatch, note_rounds: Callable[[int], None]
) -> None:
    monkeypatch.setattr(ring, "SAVED_ROWS", saved_rows)
    note_rounds(run(RINGS, share=0.15))


def test_rows_of_a_batch_ring_that_is_written_singly_equal_their_twins(
    monkeypatch: pytest.MonkeyPatch, note_rounds: Callable[[int], None]
) -> None:
    monkeypatch.setattr(ring, "SAVED_ROWS", 3)
    note_rounds(run(RINGS, widths=SINGLE_ROWS, share=0.25))


@pytest.mark.parametrize(
    ("name", "share"),
    [("lfm2", 0.12), ("qwen3_5", 0.03), ("mamba", 0.03), ("rwkv7", 0.03)],
)
def test_rows_of_a_batched_recurrent_state_equal_their_twins(
    name: str,
    share: float,
    hooked: dict[str, Mixers],
    note_rounds: Callable[[int], None],
) -> None:
    takes_lengths = name in ("lfm2", "qwen3_5")
    kinds = st.just(BatchArraysKind(hooked[name]))
    beginnings = BEGINNINGS if takes_lengths else ("merged",)
    note_rounds(run(kinds, share=share, beginnings=beginnings))

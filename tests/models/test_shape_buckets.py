"""Batches padded to a few sizes, as on CUDA, compute the same as unpadded ones."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_speculation.caches import array_bytes, arrays_in
from mlx_speculation.caches.types.leaves import flat, is_batch
from mlx_speculation.models import BatchLane, Lane, ModelHooks, RowSizes
from mlx_speculation.models.exclusions import TOGETHER
from mlx_speculation.models.shape_buckets import row_size
from support.caches.cache_twins import read
from support.covering import others_slow
from support.models.recurrent_models import RECURRENT_MODELS
from support.models.tiny_models import TINY_MODELS, build_tiny

MODELS = TINY_MODELS | RECURRENT_MODELS
BATCHED = [name for name, tiny in MODELS.items() if tiny.module in TOGETHER]
QUICK = ("llama", "gemma3_text", "qwen3_5", "deepseek_v3(MLA)", "mamba2")
IN_SIZES = RowSizes(used=True)


def fed(model: Any, count: int, seed: int) -> Lane:
    lane = Lane(model)
    lane.feed([(7 * i * i + 3 * i + 31 * seed) % 256 for i in range(count)])
    return lane


def tokens_of(rows: list[int], number: int, width: int) -> mx.array:
    """Return the tokens that rows with these seeds are fed in a round."""
    return mx.array(
        [
            [(11 * number + 5 * i + 13 * seed) % 256 for i in range(width)]
            for seed in rows
        ]
    )


def play(lane: BatchLane, tokens: mx.array, keep: list[int] | int) -> Any:
    with lane.begin(tokens.shape[1], whole=isinstance(keep, int)) as lane_round:
        logits = lane_round.forward(tokens)
        mx.eval(logits)
        lane_round.commit(keep)
    return read([logits])[0]


def test_sizes_are_those_and_their_middles() -> None:
    sizes = sorted({row_size(rows) for rows in range(1, 65)})
    assert sizes == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    for rows in range(1, 65):
        assert rows <= row_size(rows) < 1.5 * rows
        assert row_size(rows) == min(size for size in sizes if size >= rows)
    shown = sum(row_size(rows) for rows in range(1, 33))
    assert round(shown / sum(range(1, 33)), 2) == 1.13
    powers = sum(1 << (rows - 1).bit_length() for rows in range(1, 33))
    assert round(powers / sum(range(1, 33)), 2) == 1.29


def test_no_size_is_larger_than_the_most_rows() -> None:
    assert [RowSizes(20).of(rows) for rows in (15, 16, 17, 20)] == [16, 16, 20, 20]
    assert [RowSizes(32).of(rows) for rows in (17, 25)] == [24, 32]
    assert RowSizes().of(33) == 48


@pytest.mark.parametrize(
    "name", others_slow(BATCHED, ["llama", "gemma3_text", "qwen3_5"])
)
@settings(max_examples=max(2, settings().max_examples // 100))
@given(data=st.data())
def test_rows_compute_what_they_do_in_a_batch_of_their_own_size(
    name: str, data: st.DataObject
) -> None:
    model = build_tiny(MODELS[name])
    hooks = ModelHooks(model)
    lanes = [BatchLane(model, RowSizes(used=False)), BatchLane(model, IN_SIZES)]
    seeds: list[int] = []
    shown = set()
    for number in range(6):
        joining = data.draw(st.integers(0 if seeds else 5, max(0, 7 - len(seeds))))
        if joining:
            new = [10 * number + i for i in range(joining)]
            for lane in lanes:
                lane.join([fed(model, 4 + seed % 23, seed) for seed in new])
            seeds += new
        width = data.draw(st.integers(1, 5))
        each = st.lists(st.integers(1, width), min_size=len(seeds), max_size=len(seeds))
        keep = data.draw(each) if width > 1 else 1
        tokens = tokens_of(seeds, number, width)
        one, other = (play(lane, tokens, keep) for lane in lanes)
        assert one.shape == other.shape == (len(seeds), width, one.shape[-1])
        np.testing.assert_allclose(other, one, rtol=0, atol=2e-4)
        places = lanes[1].places
        assert places in (len(seeds), row_size(len(seeds)))
        shown.add(places - len(seeds))
        if width > 1:
            assert places == row_size(len(seeds))
        for leaf, exact_leaf in zip(
            *(flat(lane.caches) for lane in lanes[::-1]), strict=True
        ):
            if is_batch(leaf):
                offsets, rows = leaf.offset.tolist(), exact_leaf.offset.tolist()
                assert [offsets[place] for place in lanes[1].stand] == rows
        order = data.draw(st.permutations(range(len(seeds))))
        stay = sorted(order[: data.draw(st.integers(0, len(seeds)))])
        if len(stay) < len(seeds):
            seeds = [seeds[place] for place in stay]
            for lane in lanes:
                lane.leave(stay)
            wanted = row_size(len(seeds)) if seeds and width > 1 else len(seeds)
            assert lanes[1].places == wanted
    hooks.remove()
    for lane in lanes:
        assert lane.requests == len(seeds)
        lane.leave([])
        assert lane.nbytes == lane.places == 0


@pytest.mark.parametrize("name", QUICK)
def test_nothing_is_left_of_rows_that_have_gone(name: str) -> None:
    """Once the batch has fewer places, no bit depends on the rows that have left."""
    model = build_tiny(MODELS[name])
    hooks = ModelHooks(model)
    contents, logits = [], []
    for gone in (50, 60):
        lane = BatchLane(model, IN_SIZES)
        seeds = [1, 2, gone, 3, 4, gone + 1, 5]
        lane.join([fed(model, 20, seed) for seed in seeds])
        play(lane, tokens_of(seeds, 1, 3), [1, 2, 3, 2, 1, 3, 2])
        lane.leave([0, 1, 3, 4, 6])
        assert (lane.requests, lane.places) == (5, 6)
        seeds = [1, 2, 3, 4, 5]
        arrays = [read([array])[0] for array in arrays_in(lane.caches).values()]
        logits.append(play(lane, tokens_of(seeds, 2, 3), [1, 3, 2, 2, 1]))
        contents.append(
            arrays + [read([array])[0] for array in arrays_in(lane.caches).values()]
        )
    hooks.remove()
    assert contents[0]
    for one, other in zip(*contents, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(*logits)


def test_copies_hold_less_than_half_as_much_again() -> None:
    model = build_tiny(MODELS["llama"])
    lane = BatchLane(model, IN_SIZES)
    lane.join([fed(model, 20, seed) for seed in range(5)])
    alone = array_bytes(lane.caches)
    play(lane, tokens_of(list(range(5)), 1, 2), [1] * 5)
    assert alone < lane.nbytes < 1.5 * alone


def test_plain_rounds_are_of_the_rows_that_there_are() -> None:
    model = build_tiny(MODELS["llama"])
    lane = BatchLane(model, IN_SIZES)
    seeds = list(range(5))
    lane.join([fed(model, 20, seed) for seed in seeds])
    play(lane, tokens_of(seeds, 1, 1), 1)
    assert lane.places == 5
    play(lane, tokens_of(seeds, 2, 2), [1] * 5)
    assert lane.places == 6
    play(lane, tokens_of(seeds, 3, 1), 1)
    assert lane.places == 6  # removing the spare place would copy all rows
    lane.leave([1, 2, 3, 4])
    assert lane.places == 4


def test_nothing_changes_where_attention_makes_no_plans() -> None:
    model = build_tiny(MODELS["llama"])
    lane = BatchLane(model)
    lane.join([fed(model, 20, seed) for seed in range(5)])
    play(lane, tokens_of(list(range(5)), 1, 3), [1] * 5)
    assert lane.places == 5
    assert lane.size is None
    assert not lane.met_new_shapes()


def test_a_shape_is_new_once() -> None:
    model = build_tiny(MODELS["llama"])
    lane = BatchLane(model, IN_SIZES)
    seeds = list(range(5))
    lane.join([fed(model, 20, seed) for seed in seeds])
    is_new = []
    for number, width in enumerate([1, 3, 3, 1, 2]):
        play(lane, tokens_of(seeds, number, width), 1 if width == 1 else [0] * 5)
        is_new.append(lane.met_new_shapes())
    # The second round of width 3 repeats a shape. Shapes of plain steps are not noted.
    assert is_new == [False, True, False, False, True]
    assert not lane.met_new_shapes()

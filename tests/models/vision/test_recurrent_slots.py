"""mlx-vlm's recurrent layers have the same states on mlx-lm's and mlx-vlm's caches."""

from importlib import import_module
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache

from mlx_speculation.caches import Speculation, states
from mlx_speculation.models.vision.recurrent_slots import RecurrentSlots
from support.models.tiny_vision import WITHOUT_MLX_VLM, tiny

pytestmark = WITHOUT_MLX_VLM


def ids(start: int, stop: int) -> mx.array:
    return mx.array([[(11 * i + 5) % 200 for i in range(start, stop)]])


@pytest.mark.parametrize("keep", range(6))
def test_a_part_of_a_round_is_what_mlx_vlm_commits(keep: int) -> None:
    """The layers run the operations of mlx-vlm in its order, so bits are equal."""
    model = tiny("qwen3_5")
    vlm_caches = import_module("mlx_vlm.models.cache").make_prompt_cache(
        model.language_model
    )
    transaction = import_module("mlx_vlm.speculative.cache_state")
    positions = {"position_ids": mx.broadcast_to(mx.arange(7), (3, 1, 7))}
    model.language_model(ids(0, 7), cache=vlm_caches, **positions)
    vlm_round = transaction.start_speculative_cache(vlm_caches, 5)
    row = mx.arange(7, 12)
    positions = {"position_ids": mx.broadcast_to(row, (3, 1, 5))}
    theirs = model.language_model(ids(7, 12), cache=vlm_caches, **positions).logits
    vlm_round.commit([keep])

    caches = model.make_cache()
    with Speculation(caches, whole=True) as prompt:
        model(ids(0, 7), prompt.caches)
        prompt.commit(7)
    with Speculation(caches) as round_:
        ours = model(ids(7, 12), round_.caches)
        round_.commit(keep)
    assert not round_.reran
    assert mx.array_equal(ours, theirs).item()
    for cache, other in zip(caches, vlm_caches, strict=True):
        if isinstance(cache, ArraysCache):
            slots: Any = zip(cache.cache, other.cache, strict=True)
            for one, two in slots:
                assert mx.array_equal(one, two).item()
        else:
            assert cache.offset == other.offset == 7 + keep


def test_a_round_that_is_left_changes_nothing() -> None:
    model = tiny("qwen3_5")
    caches = model.make_cache()
    with Speculation(caches, whole=True) as prompt:
        model(ids(0, 7), prompt.caches)
        prompt.commit(7)
    before = [[*cache.cache] for cache in caches if isinstance(cache, ArraysCache)]
    with Speculation(caches) as round_:
        mx.eval(model(ids(7, 12), round_.caches))
    after = [[*cache.cache] for cache in caches if isinstance(cache, ArraysCache)]
    assert all(
        one is two
        for slots, others in zip(before, after, strict=True)
        for one, two in zip(slots, others, strict=True)
    )


def test_several_forwards_of_a_round_are_kept_in_part() -> None:
    model = tiny("qwen3_5")
    steps, rounds = model.make_cache(), model.make_cache()
    for i in range(9):
        model(ids(i, i + 1), steps)
    with Speculation(rounds) as round_:
        for start, stop in ((0, 4), (4, 5), (5, 12)):
            model(ids(start, stop), round_.caches)
        round_.commit(9)
    assert not round_.reran
    logits = model(ids(9, 10), steps), model(ids(9, 10), rounds)
    assert mx.allclose(*logits, atol=1e-4).item()
    mx.eval(states(steps), states(rounds))


def test_a_layer_that_assigns_its_states_leaves_no_notes() -> None:
    """LFM2's layers set `slots[0]` so. The model runs again to keep a prefix."""
    cache = ArraysCache(size=1)
    with Speculation([cache]) as round_:
        slots: Any = RecurrentSlots(round_.caches[0])
        slots[0] = mx.zeros((1, 2))
        assert round_.written is None
    assert cache.cache == [None]


def test_what_a_layer_reads_is_the_cache() -> None:
    cache = ArraysCache(size=2)
    slots = RecurrentSlots(cache)
    assert (slots.lengths, slots.left_padding, slots.make_mask(3)) == (None, None, None)
    assert slots.batch_size == 1
    slots.advance(3)
    source = mx.arange(5).reshape(1, 5, 1)
    assert slots.update_window(1, source, 2).tolist() == [[[3], [4]]]
    assert slots.cache[1].tolist() == cache[1].tolist() == [[[3], [4]]]

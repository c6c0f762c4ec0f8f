"""Models compute the same from keys padded to whole steps as from native keys.

The tests pad keys as on CUDA. Their steps are so short that buffers grow.
"""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlx_speculation.caches import (
    RaggedKVCache,
    SlidingKVCache,
    Speculation,
    with_slack,
)
from mlx_speculation.caches.journals import sliding_kv
from mlx_speculation.caches.types import padded_kv, ragged_kv
from mlx_speculation.models import BatchLane, Lane, ModelHooks, why_alone
from mlx_speculation.models.exclusions import KEY_STEPS, takes_key_steps
from support.caches.cache_twins import read
from support.covering import covering, others_slow
from support.models.tiny_models import TINY_MODELS, build

pytestmark = pytest.mark.usefixtures("on_the_cpu")

STEP = 8
NAMES = [name for name, tiny in TINY_MODELS.items() if tiny.module in KEY_STEPS]
BATCHED = [name for name in NAMES if why_alone(build(name)) is None]


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padded_kv, "STEP", STEP)
    for module in (padded_kv, ragged_kv, sliding_kv):
        monkeypatch.setattr(module, "asks_cudnn", lambda dtype: True)
    monkeypatch.setattr(KVCache, "step", 5)


def test_each_model_that_counts_as_tried_is_tried_here() -> None:
    assert {TINY_MODELS[name].module for name in NAMES} == KEY_STEPS


def test_other_models_get_the_native_keys() -> None:
    class Model(type(build("llama"))):  # type: ignore[misc]
        """A user's class, which may have its own attention."""

    model = build("llama")
    assert takes_key_steps(model)
    assert not takes_key_steps(Model(model.args))


# One model for each kind of attention and cache.
QUICK = (
    *("llama", "qwen3_5", "lfm2", "bailing_moe_v3", "deepseek_v3(MLA)"),
    *("gemma3_text", "gpt_oss", "llama(sliding)"),
)
SLIDING = [name for name in NAMES if TINY_MODELS[name].window]
OTHERS = [name for name in NAMES if name not in SLIDING]


@pytest.mark.parametrize(
    ("name", "slack"),  # False: sliding windows are rings; True: they have slack
    [
        *covering(SLIDING, (False, True), pairs=[(0, 1)]),
        *covering(OTHERS, (False, True)),
    ],
)
def test_rounds_in_whole_steps_compute_what_native_rounds_do(
    name: str, slack: bool
) -> None:
    model = build(name)
    made = [make_prompt_cache(model) for _ in range(2)]
    lanes = [with_slack(caches, slack=12) if slack else caches for caches in made]
    prompt = mx.array([[(7 * i * i + 3 * i) % 256 for i in range(6)]])
    for caches in lanes:
        mx.eval(model(prompt, cache=caches))
    stepped = 0
    for number in range(13):
        width = (4, 1, 7, 2, 3)[number % 5]
        tokens = mx.array([[(11 * number + 5 * i) % 256 for i in range(width)]])
        logits = []
        for caches, steps in zip(lanes, (False, True), strict=True):
            with Speculation(caches, whole=True, key_steps=steps) as speculation:
                logits.append(model(tokens, cache=speculation.caches))
                mx.eval(logits[-1])
                speculation.commit(width)
            stepped += steps and width > 1
        one, other = read(logits)
        np.testing.assert_allclose(other, one, rtol=0, atol=2e-4)
    assert stepped


@pytest.mark.parametrize("name", others_slow(BATCHED, QUICK))
def test_a_batch_in_whole_steps_computes_what_a_native_one_does(name: str) -> None:
    model = build(name)
    hooks = ModelHooks(model)
    lanes = [BatchLane(model), BatchLane(model)]
    assert lanes[0].key_steps
    lanes[0].key_steps = False
    for lane in lanes:
        alone = [Lane(model) for _ in range(3)]
        for row, one in enumerate(alone):
            one.feed([(7 * i * i + 3 * i + row) % 256 for i in range(4 + 3 * row)])
        lane.join(alone)
    for number in range(8):
        width = (4, 1, 5, 2, 3)[number % 5]
        keep = [1 + (number * (row + 1) + row) % width for row in range(3)]
        tokens = [
            [(11 * number + 5 * i + row) % 256 for i in range(width)]
            for row in range(3)
        ]
        logits = []
        for lane in lanes:
            with lane.begin(width) as lane_round:
                logits.append(lane_round.forward(mx.array(tokens)))
                mx.eval(logits[-1])
                lane_round.commit(keep)
        one, other = read(logits)
        np.testing.assert_allclose(other, one, rtol=0, atol=2e-4)
    hooks.remove()


def test_a_batch_shows_whole_steps() -> None:
    cache = RaggedKVCache(2)
    cache.in_steps = True
    rows = mx.random.normal((2, 2, 40, 4), key=mx.random.key(1))
    cache.update_and_fetch(rows[..., :3, :], rows[..., :3, :])
    for width, kept, columns in [
        (3, [1, 3], 8),
        (9, [4, 9], 16),
        (1, [1, 1], 16),
        (2, [2, 2], 24),
    ]:
        ends = [length + width for length in cache.lengths]
        with Speculation([cache]) as speculation:
            (seen,) = speculation.caches
            mask = seen.make_mask(width, return_array=True)
            keys, _ = seen.update_and_fetch(rows[..., :width, :], rows[..., :width, :])
            assert keys.shape[2] == mask.shape[-1] == columns
            assert mask[:, 0, -1].sum(axis=-1).tolist() == ends
            speculation.commit(kept)


@given(
    widths=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), max_size=12),
    prompt=st.integers(1, 20),
    window=st.sampled_from([None, 6]),
)
def test_what_is_kept_is_what_native_rounds_keep(
    widths: list[tuple[int, int]], prompt: int, window: int | None
) -> None:
    caches = KVCache(), KVCache()
    noise = mx.random.normal((1, 2, 400, 4), key=mx.random.key(3))
    at = prompt
    for cache in caches:
        cache.update_and_fetch(noise[..., :at, :], noise[..., :at, :])
    for width, kept in widths:
        rows = noise[..., at : at + width, :]
        shown = []
        for cache, steps in zip(caches, (False, True), strict=True):
            with Speculation([cache], key_steps=steps) as speculation:
                (seen,) = speculation.caches
                mask = seen.make_mask(width, return_array=True, window_size=window)
                keys, values = seen.update_and_fetch(rows, rows)
                if steps and width > 1:
                    assert keys.shape[2] == padded_kv.whole_steps(at + width)
                    assert mask.shape == (width, keys.shape[2])
                    native = create_causal_mask(width, at, window_size=window)
                    assert mx.array_equal(mask[:, : at + width], native)
                    assert not mask[:, at + width :].any()
                shown.append((keys[..., : at + width, :], values[..., : at + width, :]))
                speculation.commit(min(kept, width))
        for one, other in zip(*shown, strict=True):
            assert mx.array_equal(one, other)
        at = caches[0].offset
        assert caches[1].offset == at
        for one, other in zip(*(c.keys_and_values() for c in caches), strict=True):
            assert mx.array_equal(one, other)


@pytest.mark.parametrize(
    ("rows", "shown"),
    [(1, 512), (512, 512), (513, 1024), (4_097, 4_608), (8_193, 9_216), (2**20, 2**20)],
)
def test_steps_grow_with_the_text(
    monkeypatch: pytest.MonkeyPatch, rows: int, shown: int
) -> None:
    monkeypatch.undo()
    assert padded_kv.whole_steps(rows) == shown
    assert shown - rows < max(512, rows / 8)


def test_a_window_that_is_not_full_is_shown_in_steps() -> None:
    cache = SlidingKVCache(12, slack=20)
    rows = mx.random.normal((1, 2, 40, 4), key=mx.random.key(1))
    cache.update_and_fetch(rows[..., :3, :], rows[..., :3, :])
    shown = []
    for width, kept in [(3, 2), (9, 6), (3, 3), (2, 2)]:
        at = cache.offset
        with Speculation([cache], key_steps=True) as speculation:
            (seen,) = speculation.caches
            mask = seen.make_mask(width)
            new = rows[..., at : at + width, :]
            keys, _ = seen.update_and_fetch(new, new)
            assert keys.shape == seen.keys_and_values()[0].shape
            shown.append(keys.shape[2])
            if keys.shape[2] % STEP == 0:  # not full: starts at position 0
                native = create_causal_mask(width, at, window_size=12)
                assert mx.array_equal(mask[:, : at + width], native)
                assert mx.array_equal(
                    keys[..., : at + width, :], rows[..., : at + width, :]
                )
            speculation.commit(kept)
        assert mx.array_equal(
            cache.keys_and_values()[0][..., -kept:, :], new[..., :kept, :]
        )
    assert cache.offset == 16
    assert shown == [8, 16, 16, 13]  # the last is native: 11 old rows and 2 new
    with Speculation([SlidingKVCache(12)], key_steps=True) as speculation:
        assert speculation.caches[0].make_mask(2) == "causal"  # empty cache


def test_a_mask_of_one_row_ends_a_window_in_steps() -> None:
    cache = SlidingKVCache(12, slack=20)
    rows = mx.ones((1, 1, 3, 4))
    cache.update_and_fetch(rows, rows)
    with Speculation([cache], key_steps=True) as speculation:
        (seen,) = speculation.caches
        for n in (2, 1):
            seen.make_mask(n)
        for kept_rows in (4, 5):
            keys, _ = seen.update_and_fetch(rows[..., :1, :], rows[..., :1, :])
            assert keys.shape[2] == kept_rows


def test_a_model_that_asks_for_no_mask_gets_the_native_rows() -> None:
    cache = KVCache()
    rows = mx.ones((1, 1, 3, 4))
    cache.update_and_fetch(rows, rows)
    with Speculation([cache], key_steps=True) as speculation:
        keys, _ = speculation.caches[0].update_and_fetch(rows, rows)
        assert keys.shape[2] == 6
        for n in (3, 1):
            speculation.caches[0].make_mask(n, False, None)
        one = rows[..., :1, :]
        for kept_rows in (7, 8, 9):
            keys, _ = speculation.caches[0].update_and_fetch(one, one)
            assert keys.shape[2] == kept_rows


def test_nothing_changes_where_it_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert not padded_kv.asks_cudnn(mx.float32)
    cache = KVCache()
    rows = mx.ones((1, 1, 3, 4))
    cache.update_and_fetch(rows, rows)
    with Speculation([cache], key_steps=True) as speculation:
        mask = speculation.caches[0].make_mask(2, return_array=False, window_size=None)
        assert mask == "causal"

"""Replaying recorded mixers equals plain decoding of the kept tokens."""

import importlib
import threading
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation.caches import Speculation, states
from mlx_speculation.models import ModelHooks
from mlx_speculation.models.recurrent import recorder
from mlx_speculation.models.recurrent.mixers import MIXERS
from support.caches.cache_twins import assert_same, detached, read
from support.covering import others_slow
from support.models.recurrent_models import (
    BLOCK,
    PREFIX,
    RECURRENT_MODELS,
    build_recurrent,
    hooked,
    prefilled,
    recurrent,
)

# Models for each kind of `Mixer.recipe`, None included
QUICK = (
    *("qwen3_5", "mamba", "mamba2", "recurrent_gemma", "rwkv7", "bailing_moe_v3"),
    *("kimi_linear", "lfm2", "falcon_h1", "plamo2", "baichuan_m1", "bailing_hybrid"),
)
NEXT = mx.array([[77]])


def _kinds(model: nn.Module) -> set[tuple[str, str]]:
    return {
        (type(module).__module__, type(module).__name__)
        for _, module in model.named_modules()
    }


def slots(caches: list[Any]) -> list[mx.array]:
    kept: list[Any] = [slot for cache in recurrent(caches) for slot in cache.cache]
    return kept


def outcome(model: nn.Module, caches: list[Any]) -> Any:
    kept = [slot[...] for slot in slots(caches)]
    return read([kept, model(NEXT, cache=detached(caches))])


def speculated(model: nn.Module, caches: list[Any], width: int, keep: int) -> None:
    with Speculation(caches) as speculation:
        model(BLOCK[:, :width], cache=speculation.caches)
        speculation.commit(keep)


def parameter_paths(model: nn.Module) -> list[str]:
    flat: Any = tree_flatten(model.parameters())
    return [path for path, _ in flat]


def largest_difference(actual: Any, expected: Any) -> float:
    if isinstance(expected, list):
        pairs = zip(actual, expected, strict=True)
        return max(largest_difference(one, other) for one, other in pairs)
    return float(np.abs(actual - expected).max())


def test_every_replayable_mixer_stands_in_a_tiny_model() -> None:
    kinds = [_kinds(build_recurrent(name)) for name in RECURRENT_MODELS]
    assert set[tuple[str, str]]().union(*kinds) >= set(MIXERS)


@pytest.mark.parametrize("name", RECURRENT_MODELS)
def test_a_replayed_prefix_equals_the_prefix_fed_alone(name: str) -> None:
    """Slots and next logits equal those after feeding only the kept tokens.

    Forwards of one token and of several may round differently. So the bound is the
    difference between feeding the kept tokens at once and one by one. Models that are
    `bitwise` must have equal bits.
    """
    model = build_recurrent(name)
    start = prefilled(model)
    with hooked(model):
        for width, keep in [(2, 1), (6, 1), (6, 4), (6, 6)]:
            caches, together, singly = (detached(start) for _ in range(3))
            speculated(model, caches, width, keep)
            for index in range(keep):
                model(BLOCK[:, index : index + 1], cache=singly)
            actual, one_by_one = outcome(model, caches), outcome(model, singly)
            if RECURRENT_MODELS[name].bitwise:
                assert_same(actual, one_by_one, f"{keep} of {width}")
                continue
            model(BLOCK[:, :keep], cache=together)
            at_once = outcome(model, together)
            allowed = largest_difference(at_once, one_by_one) + 1e-4
            assert largest_difference(actual, at_once) <= allowed, (width, keep)


@pytest.mark.parametrize("name", others_slow(RECURRENT_MODELS, QUICK))
def test_several_forwards_and_several_rounds_are_replayed(name: str) -> None:
    model = build_recurrent(name)
    caches = prefilled(model)
    twin = detached(caches)
    with hooked(model):
        for widths, keep in [((1, 2, 3), 4), ((3, 3), 2), ((2, 1, 1), 3), ((6,), 0)]:
            fed = mx.concatenate([BLOCK[:, i : i + 1] for i in range(sum(widths))], 1)
            with Speculation(caches) as speculation:
                for piece in mx.split(fed, np.cumsum(widths)[:-1].tolist(), axis=1):
                    model(piece, cache=speculation.caches)
                speculation.commit(keep)
            for index in range(keep):
                model(fed[:, index : index + 1], cache=twin)
        actual, expected = outcome(model, caches), outcome(model, twin)
    if RECURRENT_MODELS[name].bitwise:
        assert_same(actual, expected, "after four rounds")
    assert largest_difference(actual, expected) < 2e-3


@pytest.mark.parametrize("name", others_slow(RECURRENT_MODELS, QUICK))
def test_hooks_change_neither_logits_nor_paths_nor_types(name: str) -> None:
    model = build_recurrent(name)
    plain = read(model(PREFIX))
    paths = parameter_paths(model)
    classes = {path: type(module) for path, module in model.named_modules()}
    with hooked(model):
        assert_same(read(model(PREFIX)), plain, "logits without a cache")
        with Speculation(make_prompt_cache(model)) as speculation:
            shown = model(PREFIX, cache=speculation.caches)
            native = model(PREFIX, cache=make_prompt_cache(model))
            assert_same(read(shown), read(native), "logits with a cache")
        assert parameter_paths(model) == paths
        for path, module in model.named_modules():
            assert isinstance(module, classes[path])
            assert type(module).__name__ == classes[path].__name__
        changed = [p for p, m in model.named_modules() if type(m) is not classes[p]]
        assert changed
    for path, module in model.named_modules():
        assert type(module) is classes[path]


def test_the_last_of_two_owners_removes_the_hook() -> None:
    model = build_recurrent("mamba")
    mixer = model.backbone.layers[0].mixer
    original = type(mixer)
    first, second = ModelHooks(model), ModelHooks(model)
    hook = type(mixer)
    assert hook is not original
    assert hook.__mro__[1] is original
    first.remove()
    first.remove()
    assert type(mixer) is hook
    second.remove()
    assert type(mixer) is original


def test_a_hooked_model_can_be_hooked_again_after_removal() -> None:
    model = build_recurrent("lfm2")
    for _ in range(3):
        caches = prefilled(model)
        with hooked(model):
            speculated(model, caches, 4, 2)
        twin = prefilled(model)
        model(BLOCK[:, :2], cache=twin)
        assert_same(outcome(model, caches), outcome(model, twin), "hooked again")


def test_two_threads_on_one_hooked_model_do_not_meet() -> None:
    model = build_recurrent("qwen3_5")
    with hooked(model):
        alone = [_rounds(model, seed) for seed in range(2)]
        together: list[Any] = [None, None]
        barrier = threading.Barrier(2)

        def work(seed: int) -> None:
            with mx.stream(mx.new_thread_local_stream(mx.default_device())):
                barrier.wait()
                together[seed] = _rounds(model, seed)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for seed in range(2):
        assert_same(together[seed], alone[seed], f"thread {seed}")


def _rounds(model: nn.Module, seed: int) -> Any:
    caches = prefilled(model)
    for step in range(6):
        block = (BLOCK + 11 * seed + step) % 256
        with Speculation(caches) as speculation:
            model(block, cache=speculation.caches)
            speculation.commit(1 + (step + seed) % 6)
        mx.eval(states(caches))
    return outcome(model, caches)


def test_a_mixer_that_is_not_in_the_table_is_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = ("mlx_lm.models.qwen3_5", "GatedDeltaNet")
    without = {place: mixer for place, mixer in MIXERS.items() if place != entry}
    monkeypatch.setattr(recorder, "MIXERS", without)
    model = build_recurrent("qwen3_5")
    caches = prefilled(model)
    twin = detached(caches)
    model(BLOCK[:, :2], cache=twin)

    def rerun(keep: int) -> None:
        model(BLOCK[:, :keep], cache=caches)

    with hooked(model), Speculation(caches, rerun=rerun) as speculation:
        model(BLOCK, cache=speculation.caches)
        speculation.commit(2)
    assert speculation.reran
    assert_same(outcome(model, caches), outcome(model, twin), "run again")


@pytest.mark.parametrize(("module", "name"), sorted(MIXERS))
def test_each_entry_of_the_table_exists(module: str, name: str) -> None:
    assert issubclass(getattr(importlib.import_module(module), name), nn.Module)

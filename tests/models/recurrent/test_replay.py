"""States replayed from recorded calls are right and lazy, and need no weights."""

import copy
import importlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from mlx_speculation.caches import RecordingArraysCache, Speculation
from mlx_speculation.caches.journals.arrays import copied
from mlx_speculation.models import source_digests
from mlx_speculation.models.recurrent import call_notes, recorder
from mlx_speculation.models.recurrent.mixers import MIXERS, Mixer
from support.caches.cache_twins import assert_same, detached, read
from support.covering import covering
from support.models.recurrent_models import (
    BLOCK,
    RECURRENT_MODELS,
    ROWS,
    RUN_AGAIN,
    build_recurrent,
    hooked,
    prefilled,
    recurrent,
)

BY_NOTES = [name for name in RECURRENT_MODELS if name not in RUN_AGAIN]
# Models that read the lengths and paddings of a batch.
TAKE_LENGTHS = (
    "qwen3_5",
    "qwen3_next(moe)",
    "kimi_linear",
    "kimi_k3",
    "bailing_moe_v3",
    "bailing_hybrid",
    "olmo_hybrid",
    "mamba2",
    "nemotron_h",
    "falcon_h1",
    "granitemoehybrid",
    "plamo2",
    "lfm2",
    "lfm2_moe",
    "gear",
)


def cached_arrays(caches: list[Any]) -> list[Any]:
    return [[*c.cache, c.lengths, c.left_padding] for c in recurrent(caches)]


def after(model: nn.Module, start: list[Any], keep: int) -> Any:
    caches = detached(start)
    model(BLOCK[:, :keep], cache=caches)
    return read(cached_arrays(caches))


def replayed(model: nn.Module, start: list[Any], keep: int) -> Any:
    caches = detached(start)
    with Speculation(caches) as speculation:
        model(BLOCK, cache=speculation.caches)
        speculation.commit(keep)
    assert not speculation.reran
    return read(cached_arrays(caches))


def test_the_models_with_recipes_are_those_of_the_table() -> None:
    ours = {f"mlx_lm.models.{RECURRENT_MODELS[name].module}" for name in RUN_AGAIN}
    assert ours == {place[0] for place, mixer in MIXERS.items() if not mixer.recipe}


@pytest.mark.parametrize("name", BY_NOTES)
def test_weights_may_be_gone_when_a_prefix_is_replayed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replayed states equal those of a mixer that runs again, bit for bit.

    With the tests' BLAS a row of a product does not depend on the other rows.
    """
    model = build_recurrent(name)
    start = prefilled(model)
    with monkeypatch.context() as patch:
        patch.setattr(recorder, "MIXERS", dict.fromkeys(MIXERS, Mixer()))
        # The mixer of baichuan_m1 cannot run again; the whole model can.
        way = after if name == "baichuan_m1" else replayed
        with hooked(model):
            expected = {keep: way(model, start, keep) for keep in (1, 5)}
    whole = model.parameters()
    with hooked(model):
        for keep, wanted in expected.items():
            caches = detached(start)
            with Speculation(caches) as speculation:
                mx.eval(model(BLOCK, cache=speculation.caches))
                model.update(tree_map(_ruined, whole))
                with monkeypatch.context() as patch:
                    for kind in (nn.Linear, nn.Embedding, nn.Conv1d):
                        patch.setattr(kind, "__call__", _forbidden)
                    speculation.commit(keep)
            assert not speculation.reran
            values = read(cached_arrays(caches))
            model.update(whole)
            assert_same(values, wanted, f"{keep} of 6")


def _ruined(weight: mx.array) -> mx.array:
    return mx.full(weight.shape, mx.nan) if weight.ndim > 1 else weight


def _forbidden(self: nn.Module, *args: Any) -> mx.array:
    raise AssertionError(f"a {type(self).__name__} was called in a replay")


@pytest.mark.parametrize("name", RECURRENT_MODELS)
def test_nothing_is_evaluated_when_a_prefix_is_kept(name: str) -> None:
    """Evaluating the tokens raises an error; a forward and a commit raise none."""
    model = build_recurrent(name)
    caches = prefilled(model)
    # On a CPU `gather_mm` in bfloat16 raises only when it is evaluated.
    left = mx.zeros((1, 1, 1), mx.bfloat16)
    poison = mx.gather_mm(left, left, rhs_indices=mx.array([0]))
    with pytest.raises(RuntimeError, match="float32"), mx.stream(mx.cpu):
        mx.eval(poison + 0)
    tokens = BLOCK + poison.astype(mx.int32).reshape(1, 1)
    with hooked(model), Speculation(caches) as speculation:
        model(tokens, cache=speculation.caches)
        speculation.commit(3)
        for cache in recurrent(caches):
            with pytest.raises(RuntimeError, match="float32"):
                mx.eval(cache.cache)


@pytest.mark.parametrize(("name", "padded"), covering(TAKE_LENGTHS, (False, True)))
def test_lengths_and_paddings_of_a_batch_are_honoured(name: str, padded: bool) -> None:
    """Rows end inside the kept prefix, after it, or before the block."""
    model = build_recurrent(name)
    start = make_prompt_cache(model)
    for cache in recurrent(start):
        if padded:
            cache.left_padding = mx.array([0, 1, 4])
        else:
            cache.lengths = mx.array([6, 3, -1])
    with hooked(model):
        for keep in (1, 2, 4):
            caches, twin = detached(start), detached(start)
            # mlx-lm's scan reads past the fed positions if a length exceeds them.
            for cache in [] if padded else recurrent(twin):
                cache.lengths = mx.minimum(cache.lengths, keep)
            with Speculation(caches) as speculation:
                model(ROWS, cache=speculation.caches)
                speculation.commit(keep)
            model(ROWS[:, :keep], cache=twin)
            for ours, theirs in zip(recurrent(caches), recurrent(twin), strict=True):
                for one, other in zip(
                    read(ours.cache), read(theirs.cache), strict=True
                ):
                    if RECURRENT_MODELS[name].bitwise:
                        assert_same(one, other, f"{keep} of 6")
                    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-3)
                ends = [length - keep for length in (6, 3, -1)]
                assert padded or ours.lengths.tolist() == ends


@pytest.mark.parametrize(
    "name", ["qwen3_5", "nemotron_h", "lfm2", "recurrent_gemma", "baichuan_m1"]
)
def test_one_call_is_replayed_for_one_prefix_after_another(name: str) -> None:
    """A batch needs this: its rows keep different numbers of tokens of one call."""
    model = build_recurrent(name)
    start = prefilled(model)
    with hooked(model):
        expected = {keep: replayed(model, start, keep) for keep in (1, 3, 5)}
        with Speculation(start) as speculation:
            model(BLOCK, cache=speculation.caches)
            shown = recurrent(speculation.caches)
            for keep in (5, 1, 3, 1):
                replays = []
                for cache in shown:
                    again = copied(cache.forwards[0].before)
                    for call in cache.forwards[0].calls:
                        call.replay(again, keep)
                    replays.append([*again.cache, again.lengths, again.left_padding])
                assert_same(read(replays), expected[keep], f"{keep} of 6")


SCANNED = {"qwen3_5": "gated_delta_update", "mamba2": "ssm_update"}


@pytest.mark.parametrize("name", SCANNED)
def test_somebody_elses_scan_is_called_and_the_mixer_runs_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(f"mlx_lm.models.{RECURRENT_MODELS[name].module}")
    native = getattr(module, SCANNED[name])
    called: list[int] = []

    def theirs(*args: Any, **kwargs: Any) -> Any:
        called.append(1)
        y, state = native(*args, **kwargs)
        return y, 2 * state

    model = build_recurrent(name)
    start = prefilled(model)
    monkeypatch.setattr(module, SCANNED[name], theirs)
    with hooked(model):
        replay = replayed(model, start, 2)
        layers = len(recurrent(start))
        assert len(called) == 2 * layers
        assert_same(replay, after(model, start, 2), "with their scan")


@pytest.mark.parametrize("name", ["qwen3_5", "recurrent_gemma", "baichuan_m1"])
def test_a_mixer_with_a_strange_method_is_not_hooked(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_recurrent(name)
    mixers = [m for _, m in model.named_modules() if _place(type(m)) in MIXERS]
    kind = type(mixers[0])
    native = kind.__call__
    monkeypatch.setattr(kind, "__call__", lambda *args, **kwds: native(*args, **kwds))
    with hooked(model):
        assert all(type(mixer) is kind for mixer in mixers)


def _place(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__name__


@pytest.mark.parametrize(
    "place",
    [
        ("mlx_lm.models.kimi_linear", "KimiDeltaAttention"),
        ("mlx_lm.models.kimi_linear", "ShortConv1d"),
    ],
)
def test_a_mixer_whose_source_is_another_one_is_not_hooked(
    place: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(source_digests.DIGESTS, place, "0" * 64)
    model = build_recurrent("kimi_linear")
    mixers = [m for _, m in model.named_modules() if _place(type(m)) in MIXERS]
    classes = [type(mixer) for mixer in mixers]
    caches = prefilled(model)
    twin = after(model, caches, 2)
    with hooked(model):
        assert [type(mixer) for mixer in mixers] == classes

        def rerun(keep: int) -> None:
            model(BLOCK[:, :keep], cache=caches)

        with Speculation(caches, rerun=rerun) as speculation:
            model(BLOCK, cache=speculation.caches)
            speculation.commit(2)
    assert speculation.reran
    assert_same(read(cached_arrays(caches)), twin, "run again")


def test_a_scan_whose_source_is_another_one_is_not_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = importlib.import_module("mlx_lm.models.olmo_hybrid").GatedDeltaNet
    recipe = MIXERS[_place(kind)].recipe
    assert recipe is not None
    assert call_notes.scan_of(kind, recipe.watch)
    place = ("mlx_lm.models.gated_delta", "gated_delta_update")
    monkeypatch.setitem(source_digests.DIGESTS, place, "0" * 64)
    assert not call_notes.scan_of(kind, recipe.watch)


def test_an_attention_that_hides_its_keys_is_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The attention also writes keys and values, so the whole model runs again."""
    kind = importlib.import_module("mlx_lm.models.baichuan_m1").Attention
    native = kind.__call__
    model = build_recurrent("baichuan_m1")
    caches = prefilled(model)
    twin = after(model, caches, 4)

    def hiding(self: Any, *args: Any, **kwargs: Any) -> Any:
        other = copy.copy(self)
        other.__class__ = kind
        return native(other, *args, **kwargs)

    def rerun(keep: int) -> None:
        model(BLOCK[:, :keep], cache=caches)

    with hooked(model):
        monkeypatch.setattr(kind, "__call__", hiding)
        with Speculation(caches, rerun=rerun) as speculation:
            model(BLOCK, cache=speculation.caches)
            speculation.commit(4)
    assert speculation.reran
    assert_same(read(cached_arrays(caches)), twin, "run again")


@pytest.mark.slow
def test_single_steps_of_kimi_k3_are_compiled_and_traced_without_notes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On Metal, which is simulated here, kimi_k3 compiles forwards of one token."""
    model = build_recurrent("kimi_k3")
    model.eval()
    caches = prefilled(model)
    twin = detached(caches)
    singly = mx.split(BLOCK[:, :3], 3, axis=1)
    for row in (*singly, BLOCK[:, 3:4]):
        model(row, cache=twin)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    with hooked(model):
        for rows, keep in ((singly[:1], 1), (singly[1:], 3)):
            with Speculation(caches) as speculation:
                for row in (*rows, BLOCK[:, 3:]):
                    model(row, cache=speculation.caches)
                speculation.commit(keep)
        mixer = model.layers[0].self_attn
        assert mixer._step is not None
        mixer._step = None
        for _ in range(2):  # while the step is traced, then compiled
            _check_single_row(mixer)
    for one, other in zip(
        read(cached_arrays(caches)), read(cached_arrays(twin)), strict=True
    ):
        for actual, wanted in zip(one[:2], other[:2], strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5)


def _check_single_row(mixer: nn.Module) -> None:
    cache: Any = RecordingArraysCache(ArraysCache(2))
    mixer(mx.random.normal((1, 1, 64), key=mx.random.key(1)), None, cache)
    again: Any = ArraysCache(2)
    cache.forwards[0].calls[0].replay(again, 1)
    assert_same(read(again.cache), read(cache.cache), "one row")

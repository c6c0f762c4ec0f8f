"""Compiled steps of a draft model give the same logits and caches as uncompiled steps.

Most tests run the steps with mlx's compiler off: a first compilation takes 16 seconds.
"""

import shutil
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache

from mlx_speculation import Sampling, SpeculativeGenerator
from mlx_speculation.caches import snapshot
from mlx_speculation.demo import demo_models
from mlx_speculation.errors import InvalidRequestError, UnsupportedModelError
from mlx_speculation.models import Lane, compiled_steps, load
from mlx_speculation.models.cpu.compiled_draft import CompiledSteps
from support.covering import others_slow
from support.models.census import BUILT, EACH_KIND, build
from support.models.tiny_tokenizer import byte_tokenizer

PROMPT = [(7 * i * i + 3 * i) % 256 for i in range(21)]
ON_CPU = mx.default_device().type == mx.DeviceType.cpu
pytestmark = pytest.mark.skipif(not ON_CPU, reason="compiled on a CPU alone")
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


@pytest.fixture(name="uncompiled")
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(shutil, "which", lambda name: name)
    mx.disable_compile()
    yield
    mx.enable_compile()


NOT_COMPILED = {"afm7", "phi3small"}  # their steps depend on the number of keys


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("name", others_slow(BUILT, EACH_KIND))
def test_an_architecture_is_compiled_or_refused(name: str) -> None:
    model = build(name)
    plain_lane, compiled_lane = Lane(model), Lane(model)
    only_kv = all(type(cache) is KVCache for cache in plain_lane.caches)
    if not only_kv or name in NOT_COMPILED:
        with pytest.raises(UnsupportedModelError, match="compile_draft is True"):
            compiled_steps(model)
        return
    compiled_lane.compiled = compiled_steps(model)
    for lane in (plain_lane, compiled_lane):
        lane.feed(PROMPT)
    for tokens in ([5], [6, 7], [8]):
        logits = []
        for lane in (plain_lane, compiled_lane):
            with lane.begin() as lane_round:
                logits.append(lane_round.forward(mx.array(tokens)))
                lane_round.commit(len(tokens))
        np.testing.assert_allclose(logits[1], logits[0], rtol=1e-3, atol=1e-3)


rounds = st.lists(
    st.tuples(st.lists(st.integers(1, 2), min_size=1, max_size=5), st.integers(0, 10)),
    min_size=1,
    max_size=8,
)


@pytest.mark.usefixtures("uncompiled")
@given(start=st.sampled_from([1, 20, 505, 511, 512]), rounds=rounds)
@settings(max_examples=max(8, settings().max_examples // 5))
def test_any_rounds_leave_what_the_models_own_leave(
    start: int, rounds: list[tuple[list[int], int]]
) -> None:
    model = build("llama")
    plain_lane, compiled_lane = Lane(model), Lane(model)
    compiled_lane.compiled = CompiledSteps(model)
    for lane in (plain_lane, compiled_lane):
        lane.feed([7 * i % 256 for i in range(start)])
    for widths, keep in rounds:
        fed = 0
        with plain_lane.begin() as one, compiled_lane.begin() as two:
            for width in widths:
                tokens = mx.array([(11 * (fed + i)) % 256 for i in range(width)])
                fed += width
                wanted, actual = one.forward(tokens), two.forward(tokens)
                np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-4)
            for lane_round in (one, two):
                lane_round.commit(min(keep, fed))
        for ours, theirs in zip(compiled_lane.caches, plain_lane.caches, strict=True):
            assert ours.offset == theirs.offset
            pairs = zip(ours.keys_and_values(), theirs.keys_and_values(), strict=True)
            for actual, wanted in pairs:
                np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("uncompiled")
def test_other_weights_are_noticed() -> None:
    model = build("llama")
    lane, steps = Lane(model), CompiledSteps(model)
    lane.feed(PROMPT)
    for seed in (1, 2):
        weight = mx.random.normal((256, 64), key=mx.random.key(seed))
        model.update({"model": {"embed_tokens": {"weight": weight}}})
        said = []
        for compiled in (steps, None):
            lane.compiled = compiled
            with lane.begin() as lane_round:
                said.append(lane_round.forward(mx.array([5])))
        np.testing.assert_allclose(said[0], said[1], rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("uncompiled")
def test_it_serves_live_caches_that_hold_the_same() -> None:
    model = build("llama")
    steps, lane = CompiledSteps(model), Lane(model)
    assert not steps.serves(lane.caches, 1)  # no buffer yet
    lane.feed(PROMPT)
    assert steps.serves(lane.caches, 1)
    assert steps.serves(lane.caches, 2)
    assert not steps.serves(lane.caches, 3)
    taken = snapshot(lane.caches)
    # Caches whose rows a snapshot shares are not served.
    if any(type(cache) is not KVCache for cache in lane.caches):
        assert not steps.serves(lane.caches, 1)
    del taken
    lane.caches[0].offset -= 1
    assert not steps.serves(lane.caches, 1)


@NEEDS_COMPILER
@pytest.mark.parametrize("trained", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_draft_is_compiled_and_drafts_the_same(trained: bool) -> None:
    if trained:
        target, tokenizer = load(str(demo_models()["dense"]))
        draft, _ = load(str(demo_models()["draft"]))
    else:
        target, tokenizer, draft = build("llama"), byte_tokenizer(), build("llama")
    made = [
        SpeculativeGenerator(
            target, tokenizer, draft=draft, draft_length=4, compile_draft=compiled
        )
        for compiled in (False, True)
    ]
    for temperature in (0.0, 0.8):
        results = [
            each.generate(
                "def main(",
                max_tokens=16,
                sampling=Sampling(temperature=temperature, seed=3),
            )
            for each in made
        ]
        assert results[0].text == results[1].text
        accepted = [result.stats.accepted for result in results]
        assert accepted[0] > 4
        assert accepted[0] == pytest.approx(accepted[1], abs=2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"draft": None}, "there is no draft model"),
        ({"draft": "lookup"}, "there is no draft model"),
        ({"draft_vocabulary": [1, 2, 3]}, "has all token ids"),
        ({"compile_draft": 1}, "True or False is needed"),
    ],
)
def test_what_cannot_be_compiled_is_refused(options: dict[str, Any], said: str) -> None:
    model = build("llama")
    kinds = [type(module) for module in model.modules()]
    request: dict[str, Any] = {"draft": build("llama"), "compile_draft": True} | options
    with pytest.raises(InvalidRequestError, match=said):
        SpeculativeGenerator(model, byte_tokenizer(), **request)
    assert [type(module) for module in model.modules()] == kinds


def test_without_a_compiler_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    model, draft = build("llama"), build("llama")
    kinds = [type(module) for module in draft.modules()]
    with pytest.raises(UnsupportedModelError, match=r"g\+\+, which is not installed"):
        SpeculativeGenerator(model, byte_tokenizer(), draft=draft, compile_draft=True)
    assert [type(module) for module in draft.modules()] == kinds


@pytest.mark.usefixtures("uncompiled")
def test_what_says_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = CompiledSteps.forward
    monkeypatch.setattr(
        CompiledSteps, "forward", lambda *args: forward(*args) * 1.5 + 0.1
    )
    with pytest.raises(UnsupportedModelError, match="other logits"):
        compiled_steps(build("llama"))

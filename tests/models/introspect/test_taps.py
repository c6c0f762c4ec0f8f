"""Taps of several owners, in several threads, with recorders."""

import gc
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import permutations
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation.caches import Speculation
from mlx_speculation.errors import (
    InvalidRequestError,
    SpeculationClosedError,
    UnsupportedModelError,
)
from mlx_speculation.models import HiddenStates, ModelHooks
from support.caches.cache_twins import assert_same, read
from support.models import census
from support.models.copies import hooked
from support.models.tiny_models import build

IDS = mx.array([[3, 141, 59, 26, 53]])
TOKENS = [(7 * i * i + 3 * i) % 256 for i in range(60)]
HYBRIDS = ["qwen3_5", "mamba", "rwkv7", "lfm2", "nemotron_h", "bailing_moe_linear"]
EVERYTHING: dict[str, Any] = {"before_norm": True, "after_norm": True}


@contextmanager
def removed(*owners: Any) -> Iterator[None]:
    try:
        yield
    finally:
        for owner in owners:
            owner.remove()


def untouched(model: nn.Module, layer: int) -> Any:
    """Return the output of a layer in a model that has no taps."""
    seen: list[Any] = []
    kind = type(model.layers[layer])

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = kind.__call__(self, *args, **kwargs)
        seen.append(read(result[0] if isinstance(result, tuple) else result))
        return result

    model.layers[layer].__class__ = type(kind.__name__, (kind,), {"__call__": call})
    model(IDS, cache=make_prompt_cache(model))
    model.layers[layer].__class__ = kind
    return seen[0]


def test_two_taps_on_one_model_collect_each_its_own() -> None:
    model = build("llama", layers=4)
    expected = [untouched(model, layer) for layer in range(4)]
    one = HiddenStates(model, layers=(0, 2))
    two = HiddenStates(model, layers=(2, 3), after_norm=True)
    with one.collect() as outer:
        model(IDS)
        with two.collect() as inner:
            model(IDS)
    with two.collect() as later:
        model(IDS)
    assert (outer.positions, inner.positions, later.positions) == (10, 5, 5)
    assert_same(read(inner.layer(2)), expected[2], "the inner block")
    assert_same(read(outer.layer(2)[:, 5:]), expected[2], "the outer block")
    one.remove()
    with two.collect() as states:
        model(IDS)
    assert_same(read(states.layer(3)), expected[3], "after the other has left")
    two.remove()
    assert not hooked(model)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_5"])
def test_the_layer_before_the_first_is_the_embedding(name: str) -> None:
    """Gemma scales the embedding that the first layer gets."""
    model = build(name, layers=4)
    taps = HiddenStates(model, layers=(-1, 0))
    with removed(taps):
        with taps.collect() as states:
            model(IDS)
        expected = taps.embed(IDS, scaled=True)
        assert_same(read(states.layer(-1)), read(expected), "the embedding")
        assert states.layer(0).shape == states.layer(-1).shape
    with pytest.raises(InvalidRequestError, match="Layer -2 was requested"):
        HiddenStates(model, layers=(-2,))


def test_states_of_forwards_are_joined_in_order() -> None:
    model = build("llama", layers=4)
    with removed(taps := HiddenStates(model, layers=(1,))):
        caches = make_prompt_cache(model)
        states = taps.states()
        for part in (IDS[:, :2], IDS[:, 2:]):
            with taps.collect(states):
                model(part, cache=caches)
        assert_same(read(states.layer(1)), untouched(model, 1), "two blocks")
        assert len(states.arrays) == 2


def test_a_forward_that_fails_adds_nothing() -> None:
    model = build("llama", layers=4)
    with removed(taps := HiddenStates(model, layers=(0,), after_norm=True)):
        states = taps.states()
        last = model.model.layers[-1]
        del model.model.layers[-1].mlp
        with pytest.raises(AttributeError, match="mlp"), taps.collect(states):
            model(IDS)
        last.mlp = build("llama", layers=4).model.layers[-1].mlp
        assert states.positions == 0
        with pytest.raises(InvalidRequestError, match="No forward of the model"):
            states.after_norm  # noqa: B018
        with taps.collect() as fresh:
            model(IDS)
        assert fresh.positions == 5


def test_what_was_not_asked_for_is_not_there() -> None:
    model = build("llama", layers=4)
    with removed(taps := HiddenStates(model, layers=(1,), after_norm=True)):
        with taps.collect() as states:
            model(IDS)
        with pytest.raises(InvalidRequestError, match=r"only \[1, 'after_norm'\]"):
            states.before_norm  # noqa: B018
        with pytest.raises(InvalidRequestError, match=r"0 is not collected, only \[1,"):
            states.layer(0)


def test_a_batch_has_states_for_each_row() -> None:
    model = build("qwen3_5")
    rows = mx.array([TOKENS[:9], TOKENS[20:29]])
    with removed(taps := HiddenStates(model, layers=(1,), **EVERYTHING)):
        with taps.collect() as states:
            logits = model(rows)
        assert states.layer(1).shape == states.after_norm.shape == (2, 9, 64)
        assert_same(read(taps.head(states.after_norm)), read(logits), "two rows")


def test_removed_taps_refuse_to_work() -> None:
    """Without its hook, `head` would run the whole model on meaningless ids."""
    model = build("llama", layers=4)
    taps = HiddenStates(model, after_norm=True)
    rows = mx.zeros((1, 2, 64))
    taps.remove()
    taps.remove()
    for use in (
        lambda: taps.head(rows),
        lambda: taps.embed(IDS),
        lambda: taps.collect().__enter__(),
    ):
        with pytest.raises(SpeculationClosedError, match="were removed"):
            use()


def test_forgotten_taps_leave_the_model() -> None:
    model = build("llama", layers=4)
    HiddenStates(model, after_norm=True)
    gc.collect()
    assert not hooked(model)


def test_a_module_that_was_replaced_is_noticed() -> None:
    model = build("llama", layers=4)
    with removed(taps := HiddenStates(model, layers=(0,), **EVERYTHING)):
        rows = mx.zeros((1, 2, 64))
        old, model.model.norm = model.model.norm, nn.RMSNorm(64)
        refused = pytest.raises(UnsupportedModelError, match="same whole number")
        with refused, taps.collect():
            model(IDS)
        model.model.norm = old
        trunk, model.model = model.model, build("llama", layers=4).model
        with pytest.raises(UnsupportedModelError, match="did not call the LlamaModel"):
            taps.head(rows)
        with pytest.raises(UnsupportedModelError, match="did not call the Transformer"):
            taps.embed(IDS, scaled=True)
        model.model = trunk
    assert not hooked(model)


@pytest.mark.parametrize("shape", [(2, 64), (1, 2, 65), (1, 1, 2, 64)])
def test_the_head_refuses_what_is_no_hidden_state(shape: tuple[int, ...]) -> None:
    model = build("llama", layers=4)
    refused = pytest.raises(InvalidRequestError, match=r"takes \[batch, positions, 64")
    with removed(taps := HiddenStates(model)), refused:
        taps.head(mx.zeros(shape))


def test_the_head_and_embeddings_are_not_collected() -> None:
    """The output layer of gpt_neox is in the trunk: `head` builds a whole forward."""
    for name in ("llama", "gpt_neox"):
        model = build(name) if name == "llama" else census.build(name)
        taps = HiddenStates(model, layers=(0, 1), **EVERYTHING)
        with removed(taps), taps.collect() as states:
            model(IDS)
            taps.head(mx.zeros((1, 3, 64)))
            taps.embed(IDS, scaled=True)
        assert states.positions == 5


def test_taps_that_are_made_inside_a_block_are_not_collected() -> None:
    model = build("llama", layers=4)
    with removed(taps := HiddenStates(model, **EVERYTHING)):
        with taps.collect() as states:
            model(IDS)
            HiddenStates(model, layers=(1,)).remove()
        assert states.positions == 5


def test_threads_on_one_model_do_not_meet() -> None:
    model = build("qwen3_5")
    prompts = [mx.array([TOKENS[start : start + 12]]) for start in (0, 12, 24)]
    taps = HiddenStates(model, layers=(0, 1), **EVERYTHING)

    def states_of(prompt: mx.array) -> Any:
        with taps.collect() as states:
            logits = model(prompt, cache=make_prompt_cache(model))
        head = taps.head(states.after_norm)
        return read([logits, head, states.layer(0), states.layer(1)])

    alone = [states_of(prompt) for prompt in prompts]
    by_thread: list[list[Any]] = [[] for _ in prompts]
    barrier = threading.Barrier(len(prompts) + 1)

    def work(index: int) -> None:
        with mx.stream(mx.new_thread_local_stream(mx.default_device())):
            barrier.wait()
            for _ in range(6):
                by_thread[index].append(states_of(prompts[index]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    barrier.wait()
    for _ in range(20):  # another owner traces the model at the same time
        HiddenStates(model, layers=(1,)).remove()
    for thread in threads:
        thread.join()
    for expected, results in zip(alone, by_thread, strict=True):
        assert len(results) == 6
        for result in results:
            assert_same(result, expected, "a thread")
    taps.remove()
    assert not hooked(model)


@pytest.mark.parametrize("name", HYBRIDS)
def test_replay_and_taps_work_at_once_whoever_came_first(name: str) -> None:
    model = build(name)

    def after(*owners: str) -> Any:
        with ExitStack() as stack:
            made: dict[str, Any] = {}
            for owner in owners:
                kind = ModelHooks(model) if owner == "recorders" else _taps(model)
                made[owner] = stack.enter_context(removed(kind)) or kind
            return _round(model, made.get("taps"))

    states, logits, next_logits = after("taps", "recorders")
    assert_same([logits, next_logits], list(after("recorders")[1:]), "without taps")
    for owners in permutations(["taps", "recorders"]):
        assert_same(list(after(*owners)), [states, logits, next_logits], str(owners))
    assert not hooked(model)


def _taps(model: nn.Module) -> HiddenStates:
    return HiddenStates(model, layers=(0, 1), **EVERYTHING)


def _round(model: nn.Module, taps: HiddenStates | None) -> tuple[Any, ...]:
    """Run six rows and keep two; return the states, the logits, and the next logits."""
    caches = make_prompt_cache(model)
    model(mx.array([TOKENS[:11]]), cache=caches)
    block = mx.array([TOKENS[11:17]])
    with Speculation(caches) as speculation, ExitStack() as stack:
        states = taps and stack.enter_context(taps.collect())
        logits = model(block, cache=speculation.caches)
        speculation.commit(2)
    assert not speculation.reran
    shown = states.arrays if states else []
    return read(shown), read(logits), read(model(mx.array([[9]]), cache=caches))

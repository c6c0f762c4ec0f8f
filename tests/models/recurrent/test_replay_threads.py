"""Hooks of one model in several threads, and of several owners in one thread.

Recorded calls belong to a thread. The last owner that leaves removes the hooks.
"""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation.caches import Speculation, states
from mlx_speculation.models import ModelHooks
from mlx_speculation.models.recurrent.replay import MixerCall
from support.caches.cache_twins import assert_same, detached, read
from support.covering import others_slow
from support.models.recurrent_models import build_recurrent

MODELS = ["qwen3_5", "mamba2", "recurrent_gemma", "baichuan_m1", "rwkv7"]
ROUNDS = 4


@pytest.fixture(name="meeting")
def _meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let linear layers yield, so that threads overlap inside the mixers."""
    native = nn.Linear.__call__

    def yielding(self: nn.Linear, x: mx.array) -> mx.array:
        time.sleep(2e-4)
        return native(self, x)

    monkeypatch.setattr(nn.Linear, "__call__", yielding)


def block(seed: int, step: int) -> mx.array:
    return (mx.arange(3)[None] * 37 + 11 * seed + 5 * step) % 256


class Rounds:
    """Rounds with partial acceptance, one after the other, on caches of their own."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._model, self._seed = model, seed
        self.caches = make_prompt_cache(model)
        model(block(seed, 99), cache=self.caches)
        mx.eval(states(self.caches))

    def play(self, step: int) -> Iterator[None]:
        """Play one round in steps; after each forward other rounds may run."""
        with Speculation(self.caches) as speculation:
            tokens = block(self._seed, step)
            self._model(tokens, cache=speculation.caches)
            yield
            self._model(tokens + 1, cache=speculation.caches)
            yield
            speculation.commit(1 + (step * (1 + self._seed)) % (2 * tokens.shape[1]))
            assert not speculation.reran
        mx.eval(states(self.caches))

    def play_all(self) -> None:
        for step in range(ROUNDS):
            for _ in self.play(step):
                pass

    def outcome(self) -> Any:
        kept = states(self.caches)
        return read([kept, self._model(mx.array([[77]]), cache=detached(self.caches))])


def alone(model: nn.Module, seed: int) -> Any:
    owner = ModelHooks(model)
    rounds = Rounds(model, seed)
    rounds.play_all()
    owner.remove()
    return rounds.outcome()


def in_threads(*works: Callable[[], None]) -> None:
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        try:
            with mx.stream(mx.new_thread_local_stream(mx.default_device())):
                barrier.wait()
                work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.usefixtures("meeting")
@pytest.mark.parametrize(
    "name", others_slow(MODELS, ["qwen3_5", "baichuan_m1", "rwkv7"])
)
def test_three_threads_and_one_that_hooks_and_unhooks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name != "rwkv7":
        monkeypatch.setattr(MixerCall, "_run_again", _incomplete)
    model = build_recurrent(name)
    classes = [type(module) for _, module in model.named_modules()]
    expected = [alone(model, seed) for seed in range(3)]
    outcomes: list[Any] = [None] * 3
    finished = threading.Event()
    left = [3]

    def decode(seed: int) -> None:
        owner = ModelHooks(model)
        try:
            rounds = Rounds(model, seed)
            rounds.play_all()
            outcomes[seed] = rounds.outcome()
        finally:
            owner.remove()
            left[0] -= 1
            if left[0] == 0:
                finished.set()

    def come_and_go() -> None:
        while not finished.is_set():
            ModelHooks(model).remove()
            finished.wait(0.001)

    in_threads(*(lambda s=seed: decode(s) for seed in range(3)), come_and_go)
    for seed in range(3):
        assert_same(outcomes[seed], expected[seed], f"thread {seed}")
    assert [type(module) for _, module in model.named_modules()] == classes


def _incomplete(self: MixerCall, cache: Any, keep: int) -> None:
    raise AssertionError(f"{type(self.mixer).__name__} runs again instead of a replay")


@pytest.mark.parametrize("name", MODELS)
def test_two_owners_take_turns_in_one_thread(name: str) -> None:
    """Two open rounds on one model; the first owner leaves inside a round."""
    model = build_recurrent(name)
    expected = [alone(model, seed) for seed in range(2)]
    owners = [ModelHooks(model) for _ in range(2)]
    both = [Rounds(model, seed) for seed in range(2)]
    for step in range(ROUNDS):
        for _ in zip(*(rounds.play(step) for rounds in both), strict=True):
            if step == 2:
                owners[0].remove()
    owners[1].remove()
    for seed in range(2):
        assert_same(both[seed].outcome(), expected[seed], f"owner {seed}")


def test_an_owner_that_is_collected_in_another_thread_removes_its_hooks() -> None:
    class Owner:
        def __init__(self, model: nn.Module) -> None:
            self.itself = self  # only the collector can free it
            weakref.finalize(self, ModelHooks(model).remove)

    model = build_recurrent("qwen3_5")
    classes = [type(module) for _, module in model.named_modules()]
    rounds = Rounds(model, 1)
    expected = alone(model, 1)
    stays = ModelHooks(model)
    Owner(model)

    def collect() -> None:
        gc.collect()

    in_threads(rounds.play_all, collect)
    assert_same(rounds.outcome(), expected, "while another owner is collected")
    assert any(type(m) not in classes for _, m in model.named_modules())
    stays.remove()
    assert [type(module) for _, module in model.named_modules()] == classes

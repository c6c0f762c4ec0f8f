import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from support.models.tiny_models import TINY_MODELS, build

PROMPT = mx.array([(7 * i * i + 3 * i) % 256 for i in range(12)])


def test_there_are_twenty() -> None:
    assert len(TINY_MODELS) == 20


@pytest.mark.parametrize("name", TINY_MODELS)
def test_a_tiny_model_writes_finite_and_varied_text(name: str) -> None:
    tokens = []
    for token, log_probs in generate_step(PROMPT, build(name), max_tokens=24):
        tokens.append(token)
        assert bool(mx.isfinite(log_probs).all())
    assert len(tokens) == 24
    assert len(set(tokens)) >= 10


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY_MODELS)
@pytest.mark.parametrize("seed", range(4))
def test_long_greedy_text_does_not_fall_into_a_loop(name: str, seed: int) -> None:
    steps = generate_step(PROMPT, build(name, seed=seed), max_tokens=120)
    tokens = [token for token, _ in steps]
    assert len(set(tokens)) >= 10
    assert len(set(tokens[60:])) >= 5


@pytest.mark.parametrize("name", TINY_MODELS)
def test_a_changed_token_far_back_changes_the_logits(name: str) -> None:
    model = build(name)
    changed = mx.concatenate([PROMPT[:4], PROMPT[4:5] + 1, PROMPT[5:]])
    difference = mx.abs(model(PROMPT[None])[0, -1] - model(changed[None])[0, -1])
    assert float(difference.max()) > 1e-3


@pytest.mark.parametrize("name", TINY_MODELS)
def test_the_recorded_window_is_that_of_the_rotating_caches(name: str) -> None:
    windows = {
        cache.max_size
        for cache in make_prompt_cache(build(name))
        if isinstance(cache, RotatingKVCache)
    }
    window = TINY_MODELS[name].window
    assert windows == (set() if window is None else {window})


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gemma4_text", "mamba2"])
def test_weights_depend_on_the_seed_and_on_nothing_else(name: str) -> None:
    first = build(name, seed=3)
    mx.random.seed(99)
    again, other = build(name, seed=3), build(name, seed=4)
    for (path, a), (_, b), (_, c) in zip(
        *(tree_flatten(model.parameters()) for model in (first, again, other)),
        strict=True,
    ):
        assert a.dtype == mx.float32, path
        assert mx.array_equal(a, b), path
        assert not mx.array_equal(a, c), path


@pytest.mark.parametrize("name", TINY_MODELS)
def test_the_vocabulary_can_be_chosen(name: str) -> None:
    assert build(name, vocab=97)(PROMPT[None] % 97).shape == (1, 12, 97)

"""With `isolated=True` the live caches are never written before the commit.

Random rounds are in test_twins.py. Here are whole models, and caches that cannot be
copied.
"""

import threading
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from mlx_speculation.caches import Speculation, leaves, states
from mlx_speculation.errors import UnsupportedCacheError
from mlx_speculation.models import ModelHooks
from support.caches.cache_twins import Held, assert_same, detached, read
from support.models.tiny_models import TINY_MODELS, build

PROMPT = mx.array([[(37 * i * i + 11 * i) % 256 for i in range(20)]])
BLOCK = mx.array([[200, 100, 50, 25]])
HALF, SINGLE = mx.bfloat16, mx.float32


def prefilled(name: str, dtype: mx.Dtype = SINGLE) -> tuple[nn.Module, list[Any]]:
    """Build a tiny model whose caches hold a prompt longer than its windows."""
    model = build(name)
    model.set_dtype(dtype)
    caches = make_prompt_cache(model)
    model(PROMPT, cache=caches)
    mx.eval(states(caches))
    return model, caches


def cache_contents(caches: list[Any]) -> Any:
    offsets = [vars(leaf).get("offset") for _, leaf in leaves(caches)]
    return read([states(caches), offsets])


HALVES = ("llama", "gemma4_text", "qwen3_5", "mamba2", "nemotron_h", "rwkv7", "lfm2")
# Other models are slow: in half precision each compiles a dozen kernels.
QUICK_HALVES = ("llama", "qwen3_5", "lfm2")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, SINGLE) for name in TINY_MODELS),
        *(
            pytest.param(
                name, HALF, marks=() if name in QUICK_HALVES else pytest.mark.slow
            )
            for name in HALVES
        ),
    ],
    ids=str,
)
def test_a_model_sees_the_native_caches_and_writes_nothing_live(
    name: str, dtype: mx.Dtype
) -> None:
    model, caches = prefilled(name, dtype)
    native = detached(caches)
    before = Held(caches, values=True)
    owner = ModelHooks(model)
    with Speculation(caches, isolated=True) as speculation:
        for width in (4, 1, 3):
            shown = model(BLOCK[:, :width], cache=speculation.caches)
            expected = model(BLOCK[:, :width], cache=native)
            mx.eval(states(speculation.caches))
            before.assert_unchanged(f"the live caches after {width} rows")
            assert_same(read([shown]), read([expected]), f"the logits of {width} rows")
        speculation.prepare(8)
        before.assert_unchanged("the live caches after a prepare")
        speculation.commit(8)
    owner.remove()
    assert_same(cache_contents(caches), cache_contents(native), "all of a round")


def test_a_part_of_an_unrecorded_mixer_is_run_again_on_the_live_caches() -> None:
    model, caches = prefilled("qwen3_5")
    native = detached(caches)
    model(BLOCK[:, :2], cache=native)
    before = Held(caches, values=True)

    def rerun(keep: int) -> None:
        before.assert_unchanged("the live caches before the second run")
        model(BLOCK[:, :keep], cache=caches)

    with Speculation(caches, rerun=rerun, isolated=True) as speculation:
        model(BLOCK, cache=speculation.caches)
        speculation.commit(2)
    assert speculation.reran
    assert_same(cache_contents(caches), cache_contents(native), "a part, run again")


def test_what_cannot_be_copied_is_refused_before_anything_is_touched() -> None:
    caches: Any = [KVCache(), RotatingKVCache(max_size=4)]
    caches[1].tag = threading.Lock()
    before = Held(caches, values=False)
    with pytest.raises(UnsupportedCacheError, match="RotatingKVCache cannot be copied"):
        Speculation(caches, isolated=True)
    before.assert_unchanged("the caches after a refusal")
    Speculation(caches)

"""Real mixers with recorders on them, for the twins of recurrent states."""

from collections.abc import Iterator
from contextlib import contextmanager

from mlx_lm.models import lfm2
from mlx_lm.models.lfm2 import ShortConv

from mlx_speculation.models import ModelHooks
from support.caches.cache_twins import Mixers
from support.models.tiny_models import TINY_MODELS, build

SMALLER = {"hidden_size": 8}


@contextmanager
def hooked_mixers() -> Iterator[dict[str, Mixers]]:
    """Hook the mixers of four families for the length of the block."""
    models = {name: build(name) for name in ("qwen3_5", "mamba", "rwkv7")}
    conv = ShortConv(lfm2.ModelArgs.from_dict(TINY_MODELS["lfm2"].args | SMALLER), 0)
    owners = [ModelHooks(model) for model in (*models.values(), conv)]
    rwkv7 = models["rwkv7"].model.layers[0]
    yield {
        "lfm2": Mixers("lfm2", [conv], 1, hidden=8),
        "qwen3_5": Mixers("qwen3_5", [models["qwen3_5"].layers[0].linear_attn], 2),
        "mamba": Mixers("mamba", [models["mamba"].backbone.layers[0].mixer], 2),
        "rwkv7": Mixers("rwkv7", [rwkv7.attn, rwkv7.ffn], 3),
    }
    for owner in owners:
        owner.remove()

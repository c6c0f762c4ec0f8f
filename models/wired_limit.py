"""What a device needs while a model generates."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step, wired_limit


@contextmanager
def wired(model: nn.Module) -> Iterator[None]:
    """Keep the model's weights wired on devices that page memory, as mlx-lm does.

    Elsewhere, such as on a CPU, it does nothing.
    """
    with wired_limit(model):
        yield


def mlx_lm_speed(model: nn.Module, prompt: Sequence[int], tokens: int) -> float:
    """Decode greedily with mlx-lm's own loop; return tokens per second after prefill.

    It is what any speed of ours is compared with.
    """
    started = 0.0
    steps = generate_step(mx.array(list(prompt)), model, max_tokens=tokens)
    for index, _ in enumerate(steps):
        if index == 0:
            started = time.perf_counter()
    mx.synchronize()
    return (tokens - 1) / (time.perf_counter() - started)

"""Whether a forward is one of a round, in this thread.

A round's forward is over a few rows, and is not the one that reads a prompt: some
layers have a better way for it, and some of these ways are for one device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import mlx.core as mx

_in_round: ContextVar[bool] = ContextVar("in_round", default=False)
_on_cuda: ContextVar[bool] = ContextVar("on_cuda", default=False)

in_round = _in_round.get
in_round_on_cuda = _on_cuda.get  # found once for all layers of a forward


def cuda_serves() -> bool:
    """Whether what is computed here and now is computed with CUDA."""
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    return on_gpu and mx.cuda.is_available()


@contextmanager
def rows_of_a_round() -> Iterator[None]:
    """Let layers take their ways for a few rows, in this thread, inside the block."""
    token, on_cuda = _in_round.set(True), _on_cuda.set(cuda_serves())
    try:
        yield
    finally:
        _in_round.reset(token)
        _on_cuda.reset(on_cuda)

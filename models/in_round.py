"""Whether a forward is one of a round, in this thread, and what helps it here.

A round's forward is over a few rows, and is not the one that reads a prompt: some
layers have a better way for it, and some of these ways are for one device.
"""

import functools
import itertools
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import mlx.core as mx

from mlx_speculation.blas import blas_in_use

Device = Literal["cuda", "x86"]

_in_round: ContextVar[bool] = ContextVar("in_round", default=False)
_device: ContextVar[Device | None] = ContextVar("device", default=None)
_products: ContextVar[Iterator[int]] = ContextVar("products")

# Products of a forward from one submission to the next; a layer has some 7. A count,
# and no time, so that all ranks of a sharded model submit alike.
PRODUCTS_AT_ONCE = 32

in_round = _in_round.get
device_of_round = _device.get  # found once for all layers of a forward


def cuda_serves() -> bool:
    """Whether what is computed here and now is computed with CUDA."""
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    return on_gpu and mx.cuda.is_available()


@functools.cache
def _openblas() -> bool:
    return blas_in_use().startswith("OpenBLAS")


def rows_differ(dtype: mx.Dtype) -> bool:
    """Return whether rows of a product differ here from single rows by rounding."""
    on_cpu: bool = mx.default_device().type == mx.DeviceType.cpu
    return on_cpu and dtype == mx.float32 and _openblas()


def x86_serves() -> bool:
    """Whether rows differ on a processor for which mlx has no vector code."""
    return platform.machine() in ("x86_64", "AMD64") and rows_differ(mx.float32)


def _device_here() -> Device | None:
    if cuda_serves():
        return "cuda"
    return "x86" if x86_serves() else None


@contextmanager
def rows_of_a_round() -> Iterator[None]:
    """Let layers take their ways for a few rows, in this thread, inside the block."""
    token, device = _in_round.set(True), _device.set(_device_here())
    products = _products.set(itertools.count(1))
    try:
        yield
    finally:
        _products.reset(products)
        _in_round.reset(token)
        _device.reset(device)


def submit_in_parts(product: mx.array) -> None:
    """Submit the forward of a round as far as it is built, every so many products.

    On a GPU the first layers run while the graph of the others is built. Without this
    the device waits for all of it, since a round cannot be built before the last one
    was read.
    """
    if next(_products.get()) % PRODUCTS_AT_ONCE == 0:
        mx.async_eval(product)

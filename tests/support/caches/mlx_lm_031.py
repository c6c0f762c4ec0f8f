"""Saves caches with mlx-lm 0.31.3 or an earlier version, as files for the tests.

The files in tests/caches/files/data were written by one run with each version:

    PYTHONPATH=FOLDER python tests/support/caches/mlx_lm_031.py VERSION OUT

FOLDER contains mlx-lm VERSION. Tests require that files from before 0.31 are refused.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx


def numbers(*shape: int, start: int = 0) -> mx.array:
    """Return float16 numbers that are all different."""
    count = 1
    for dim in shape:
        count *= dim
    return mx.arange(start, start + count).reshape(shape).astype(mx.float16)


def _write(cache: Any, widths: list[int], batch: int = 1, dim: int = 4) -> Any:
    start = 0
    for width in widths:
        keys = numbers(batch, 2, width, dim, start=start)
        cache.update_and_fetch(keys, -keys)
        start += 1000
    return cache


def _slots(cache: Any, count: int) -> Any:
    for i in range(count):
        cache[i] = numbers(1, 3, i + 1, start=10 * i)
    return cache


def files(native: Any) -> dict[str, list[Any]]:
    """Return the caches of each file, made from a version's cache module."""
    ring = native.BatchRotatingKVCache
    chunked = _write(native.ChunkedKVCache(256), [300], dim=1)
    chunked.maybe_trim_front()
    pair = (_write(native.KVCache(), [3]), _slots(native.ArraysCache(2), 2))
    return {
        "single": [
            _write(native.KVCache(), [5, 1]),
            _write(native.RotatingKVCache(8, keep=2), [5, 1]),
            _write(native.RotatingKVCache(8, keep=2), [6, *[1] * 5]),
            _write(native.RotatingKVCache(8), [12]),
            _write(native.QuantizedKVCache(32, 4), [5], dim=32),
            _slots(native.ArraysCache(2), 2),
            _write(native.ConcatenateKVCache(), [5, 1]),
            _write(native.ChunkedKVCache(300), [5, 1]),
            _slots(native.ArraysCache(3), 3),
        ],
        "batch": [
            _write(native.BatchKVCache([1, 0]), [5, 1], batch=2),
            _write(ring(8, [1, 0]), [5, 1], batch=2),
            _write(ring(8, [1, 0]), [6, *[1] * 5], batch=2),
        ],
        "chunked": [_write(chunked, [2], dim=1)],  # lacks data that loading needs
        "list": [native.CacheList(*pair)],
    }


def _main(version: str, out: Path) -> None:
    native = importlib.import_module("mlx_lm.models.cache")
    for name, made in files(native).items():
        path = out / f"mlx_lm_{version}_{name}.safetensors"
        native.save_prompt_cache(str(path), made, {"text": "old.er"})


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]))

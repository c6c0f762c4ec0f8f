"""The operations for the few rows of a round depend on the BLAS and the machine."""

import platform
from collections.abc import Iterator

import mlx.core as mx
import pytest

from mlx_speculation.models import round_context
from mlx_speculation.models.round_context import (
    device_of_round,
    rows_differ,
    rows_of_a_round,
    x86_serves,
)

on_cpu = pytest.mark.skipif(
    mx.default_device().type != mx.DeviceType.cpu, reason="the tests are for CPUs"
)


@pytest.fixture(autouse=True)
def _asked_again() -> Iterator[None]:
    round_context._openblas.cache_clear()
    yield
    round_context._openblas.cache_clear()


@on_cpu
@pytest.mark.parametrize(
    ("blas", "machine", "differ", "serves"),
    [
        ("OpenBLAS 0.3.21", "x86_64", True, True),
        ("OpenBLAS 0.3.21", "AMD64", True, True),
        ("OpenBLAS 0.3.21", "aarch64", True, False),
        ("reference BLAS", "x86_64", False, False),
    ],
)
def test_rows_differ_with_openblas_in_float32(
    blas: str,
    machine: str,
    differ: bool,
    serves: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(round_context, "blas_in_use", lambda: blas)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert rows_differ(mx.float32) is differ
    assert not rows_differ(mx.bfloat16)
    assert x86_serves() is serves
    assert device_of_round() is None
    with rows_of_a_round():
        assert device_of_round() == ("x86" if serves else None)
    assert device_of_round() is None

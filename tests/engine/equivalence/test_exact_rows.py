"""Findings of `check --exact`: do the bits of a row depend on its forward?"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_speculation import SpeculativeGenerator
from mlx_speculation.caches import FixedShape
from mlx_speculation.engine.equivalence.exact_rows import check_exact
from mlx_speculation.engine.exact_verdict import (
    ExactVerdict,
    read_verdict,
    save_verdict,
)
from mlx_speculation.errors import (
    CostFileWarning,
    InvalidRequestError,
    UnsupportedModelError,
)
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer

pytestmark = pytest.mark.usefixtures("on_the_cpu")

SHAPE = FixedShape(4, 16)
FOUND = ExactVerdict(100, 3, 0.25, 64, 0.01, 0.02)


class Strange(nn.Module):
    """An output layer whose rows depend on their place, or on other rows."""

    def __init__(self, inner: Any, wrong: Callable[[mx.array], mx.array]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inner, self._wrong = inner, wrong

    def __call__(self, x: mx.array) -> mx.array:
        out: mx.array = self.inner(x)
        return out + self._wrong(x)


@pytest.mark.parametrize(("name", "views"), [("llama", 2), ("nemotron_h", 1)])
def test_a_model_that_keeps_the_promise_is_found_to(name: str, views: int) -> None:
    reports: list[tuple[int, int]] = []
    verdict = check_exact(
        build(name), SHAPE, 16 * views - 2, report=lambda *done: reports.append(done)
    )
    assert verdict.same
    assert verdict.largest == 0
    # Each view is checked at its first 8 tokens and at its last 8. Each token is fed
    # with random tokens behind it (1 row compared), and with up to 3 of the text behind
    # it (4 rows, fewer for the last tokens). The 8 are also fed in rounds (8 rows).
    places = 2 * views
    assert verdict.rows == places * (8 + (5 * 4 + 3 + 2 + 1) + 8)
    assert verdict.context == views * 16
    assert reports == [(n, places) for n in range(1, places + 1)]
    assert verdict.plain_seconds > 0
    assert verdict.exact_seconds > 0


WRONG = {
    "place": lambda x: mx.where(mx.arange(x.shape[1]) == 3, 1e-3, 0.0)[None, :, None],
    "company": lambda x: 1e-5 * x.sum(),
}


@pytest.mark.parametrize("what", WRONG)
def test_rows_that_depend_on_others_are_found(what: str) -> None:
    model: Any = build("llama")
    model.lm_head = Strange(model.lm_head, WRONG[what])
    verdict = check_exact(model, SHAPE, 16)
    assert verdict.differing > 0
    assert verdict.largest > 0
    assert f"{verdict.differing} of {verdict.rows} rows differ" in str(verdict)


def test_a_model_that_was_not_tried_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="mamba"):
        check_exact(build("mamba"), SHAPE, 16)


def test_what_was_found_is_kept_and_a_failure_refused() -> None:
    model, shape = build("llama", vocab=200), FixedShape()
    tokenizer = byte_tokenizer()
    assert read_verdict(model, shape) is None
    save_verdict(model, shape, FOUND)
    assert read_verdict(model, shape) == FOUND
    assert read_verdict(model, FixedShape(4)) is None
    assert read_verdict(build("llama", vocab=201), shape) is None
    with pytest.raises(InvalidRequestError, match="3 of 100 rows differ in a bit"):
        SpeculativeGenerator(model, tokenizer, exact=True)
    SpeculativeGenerator(model, tokenizer, exact=4)
    save_verdict(model, shape, ExactVerdict(100, 0, 0.0, 64, 0.01, 0.02))
    assert SpeculativeGenerator(model, tokenizer, exact=True).exact == 8


def test_a_file_that_is_broken_is_passed_over(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("MLX_SPECULATION_CACHE", str(tmp_path))
    model = build("llama")
    save_verdict(model, SHAPE, FOUND)
    (file,) = (tmp_path / "exact").iterdir()
    file.write_text('{"version": 1}')
    with pytest.warns(CostFileWarning, match="cannot be used"):
        assert read_verdict(model, SHAPE) is None
    monkeypatch.setattr("mlx_speculation.measured_file.write_json", _full)
    with pytest.warns(CostFileWarning, match="cannot be written"):
        save_verdict(model, SHAPE, FOUND)


def _full(*_: Any) -> None:
    raise OSError("no space is left")

"""Heads of every family: rows of history, and embeddings or outputs of their own."""

import io
from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx
import pytest

from mlx_speculation.caches import leaves
from mlx_speculation.models import HiddenStates
from mlx_speculation.models.mtp.head import Mtp
from support.models.mtp_checkpoints import LAYOUTS, make

DIM, VOCAB = 64, 256
SLOTS = 21  # longer than a window of 16

Build = Callable[[str], Mtp]


@pytest.fixture(name="built", scope="module")
def _built() -> Build:
    @cache
    def one(name: str) -> Mtp:
        _, target, head = make(name)
        return Mtp(head, HiddenStates(target, after_norm=True))

    return one


def rows(seed: int = 0) -> tuple[mx.array, mx.array]:
    states, ids = mx.random.split(mx.random.key(seed))
    hidden = mx.random.normal((1, SLOTS, DIM), key=states)
    return hidden, mx.random.randint(0, VOCAB, (1, SLOTS), key=ids)


def content(caches: list[Any]) -> list[mx.array]:
    kept = [leaf.keys_and_values() for _, leaf in leaves(caches)]
    return [array for pair in kept for array in pair]


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_of_history_need_neither_attention_nor_mlp(
    name: str, built: Build
) -> None:
    mtp, (hidden, tokens) = built(name), rows()
    caches = mtp.head.new_caches()[0]
    mtp.history(hidden, tokens, caches)
    keys_and_values = _operations(*content(caches))
    whole = _operations(*mtp.rows(hidden, tokens, mtp.head.new_caches()[0]))
    heavy = {"ScaledDotProductAttention", "Softmax", "GatherMM", "Sigmoid"}
    assert not keys_and_values.keys() & heavy
    assert whole.keys() & heavy
    # One product for the projection, one or two for keys and values, one per indexer.
    assert 2 <= _products(keys_and_values) <= 4
    assert _products(whole) >= _products(keys_and_values) + 3


def _products(operations: dict[str, int]) -> int:
    return operations.get("Matmul", 0) + operations.get("AddMM", 0)


def _operations(*arrays: mx.array) -> dict[str, int]:
    """Return the count of each operation in the graph of some arrays."""
    text = io.StringIO()
    mx.export_to_dot(text, *arrays)
    counts: dict[str, int] = {}
    for line in text.getvalue().splitlines():
        if "label" in line and "rectangle" in line:
            name = line.split('label ="')[-1].split('"')[0]
            counts[name] = counts.get(name, 0) + 1
    return counts


class Refusing:
    """The embedding and output of a target; each raises an error that names it."""

    def embed(self, tokens: mx.array) -> mx.array:
        raise AssertionError("embed was asked")

    def head(self, hidden: mx.array) -> mx.array:
        raise AssertionError("head was asked")


def test_ends_of_its_own_are_used(built: Build) -> None:
    hidden, tokens = rows()
    longcat, step = built("longcat_flash"), built("step3p5")
    with pytest.raises(AssertionError, match="head was asked"):
        Mtp(longcat.head, Refusing()).rows(hidden, tokens, longcat.head.new_caches()[0])
    with pytest.raises(AssertionError, match="embed was asked"):
        Mtp(step.head, Refusing()).rows(hidden, tokens, step.head.new_caches()[0])

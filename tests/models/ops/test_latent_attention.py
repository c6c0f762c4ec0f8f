"""Attention over latents computes several rows like single rows."""

import importlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation.models import Lane, ModelHooks
from mlx_speculation.models.ops import latent_attention
from mlx_speculation.models.ops.latent_attention import ATTENTIONS, absorbing_hooks
from support.caches.cache_twins import read
from support.models.census import build

MODULES = sorted(home.removeprefix("mlx_lm.models.") for home, _ in ATTENTIONS)
PROMPT = [(7 * i * i + 3 * i) % 256 for i in range(21)]
ROWS = [201, 7, 96, 255, 31]


def attentions(model: nn.Module) -> list[nn.Module]:
    return [module for module, _ in absorbing_hooks(model)]


def rows_of(model: nn.Module, *, whole: bool = False) -> mx.array:
    lane = Lane(model, make_prompt_cache(model))
    lane.feed(PROMPT)
    with lane.begin(whole=whole) as lane_round:
        output = lane_round.forward(mx.array(ROWS))
        mx.eval(output)
    return output


def single_rows(model: nn.Module) -> mx.array:
    lane = Lane(model, make_prompt_cache(model))
    lane.feed(PROMPT)
    logits = []
    for token in ROWS:
        with lane.begin(whole=True) as lane_round:
            logits.append(lane_round.forward(mx.array([token])))
            mx.eval(logits[-1])
            lane_round.commit(1)
    return mx.concatenate(logits)


@pytest.fixture
def latent_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list that records (rows, head dimension) of each attention call."""
    seen: list[tuple[int, int]] = []
    original = scaled_dot_product_attention

    def attend(queries: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        seen.append((queries.shape[2], queries.shape[3]))
        return original(queries, *args, **kwargs)

    monkeypatch.setattr(latent_attention, "scaled_dot_product_attention", attend)
    for home, _ in ATTENTIONS:  # record mlx-lm's own calls too
        module = importlib.import_module(home)
        monkeypatch.setattr(module, "scaled_dot_product_attention", attend)
    latent_attention._absorbing.cache_clear()
    return seen


@pytest.mark.parametrize("name", MODULES)
def test_rows_of_a_round_are_those_of_plain_decoding(name: str) -> None:
    model = build(name)
    assert attentions(model)
    native = rows_of(model)
    owner = ModelHooks(model)
    one, absorbed_rows, several = read([single_rows(model), rows_of(model), native])
    owner.remove()
    np.testing.assert_allclose(absorbed_rows, one, rtol=0, atol=2e-4)
    np.testing.assert_allclose(absorbed_rows, several, rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", MODULES)
def test_latents_are_asked_in_rounds_and_nowhere_else(
    name: str, latent_calls: list[tuple[int, int]]
) -> None:
    model = build(name)
    rank = {module.kv_lora_rank for module in attentions(model)}
    owner = ModelHooks(model)
    rows_of(model)
    round_rows = [dim for rows, dim in latent_calls if rows == len(ROWS)]
    prompt_rows = [dim for rows, dim in latent_calls if rows == len(PROMPT)]
    assert round_rows
    assert set(round_rows) == rank
    assert prompt_rows
    assert rank.isdisjoint(prompt_rows)
    latent_calls.clear()
    rows_of(model, whole=True)
    assert rank.isdisjoint(dim for _, dim in latent_calls)
    owner.remove()
    latent_calls.clear()
    rows_of(model)
    assert rank.isdisjoint(dim for _, dim in latent_calls)


def test_a_class_of_ones_own_keeps_its_way() -> None:
    model = build("deepseek_v3")
    first: Any = attentions(model)[0]

    class Attention(type(first)):  # type: ignore[misc]
        """A user's class, which may attend in another way."""

    first.__class__ = Attention
    assert all(module is not first for module in attentions(model))

"""Logits of a draft tree equal those of its paths, each fed as a chain.

The chains run token by token, without hooks, on mlx-lm's own caches.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation.caches import SlidingKVCache
from mlx_speculation.errors import UnsupportedCacheError, UnsupportedModelError
from mlx_speculation.models import (
    Lane,
    ModelHooks,
    TreeForward,
    TreeHooks,
    check_tree_model,
    keep_path,
    tree_forward,
    tree_rows,
)
from support.caches.cache_twins import detached
from support.drafters.tree_drafter import path_to
from support.identity import prompt_of
from support.models import census
from support.models.tiny_models import build

PARENTS = [-1, 0, 0, 1, 1, 2, 4, -1, 7, 8, 9, 6]
PROMPT = prompt_of(41)  # more than two windows
NODES = [(91 * i + 17) % 256 for i in range(len(PARENTS))]
MODELS = ("llama", "gemma3_text", "llama(sliding)", "qwen3")
# Models of the quick census that take trees; its other models are refused.
TAKEN = {
    *("llama", "deepseek_v3", "mixtral", "gemma3n", "gpt_oss", "cohere2"),
    *("afm7", "ernie4_5_moe", "gemma2", "gemma3_text"),
    *("phixtral",),
}


def by_chains(model: nn.Module, prompt: list[int]) -> mx.array:
    """Return the logits of each node, [nodes, vocab], computed on mlx-lm's caches."""
    root: Any = make_prompt_cache(model)
    model(mx.array([prompt[:-1]]), cache=root)
    model(mx.array([prompt[-1:]]), cache=root)
    kept: list[Any] = []
    rows = []
    for parent, token in zip(PARENTS, NODES, strict=True):
        kept.append(detached(root if parent < 0 else kept[parent]))
        rows.append(model(mx.array([[token]]), cache=kept[-1])[0, -1])
    return mx.stack(rows)


class Hooks:
    """A model with the hooks of a generator that drafts trees."""

    def __init__(self, model: nn.Module) -> None:
        self._owners: list[Any] = [ModelHooks(model), TreeHooks(model)]

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None:
        for each in self._owners:
            each.remove()


@pytest.mark.parametrize("sliding", ["slack", "native"])
@pytest.mark.parametrize("name", MODELS)
def test_rows_of_a_tree_are_those_of_its_paths(name: str, sliding: Any) -> None:
    model = build(name)
    for prompt in (PROMPT, PROMPT[:3]):
        expected = by_chains(model, prompt)
        with Hooks(model):
            lane = Lane(model, sliding=sliding)
            lane.run = TreeForward(model)
            lane.feed(prompt[:-2])
            with lane.begin() as lane_round:
                rows = tree_rows(mx.array(PARENTS), levels=6, lead=2)
                with tree_forward(rows):
                    fed = mx.array([*prompt[-2:], *NODES])
                    logits = lane_round.forward(fed)[2:]
                assert mx.allclose(logits, expected, atol=2e-4).item()
                path = path_to(PARENTS, 11)
                keep_path(lane_round, [0, 1, *(2 + i for i in path)], shown=False)
                lane_round.prepare(2 + len(path))
                lane_round.commit(2 + len(path))
            # The row after the kept path equals the row after the same plain text.
            text = [*prompt, *(NODES[i] for i in path)]
            assert lane.seen == len(text)
            row = lane.model(mx.array([[5]]), cache=lane.caches)[0, -1]
        caches: Any = make_prompt_cache(model)
        alone = model(mx.array([[*text, 5]]), cache=caches)[0, -1]
        assert mx.allclose(row, alone, atol=2e-4).item()


def test_a_window_is_past_its_end_in_these_tests() -> None:
    caches = Lane(build("gemma3_text"), sliding="slack").caches
    windows = [each.max_size for each in caches if isinstance(each, SlidingKVCache)]
    assert windows
    assert max(windows) * 2 < len(PROMPT)


@pytest.mark.parametrize("name", census.EACH_KIND)
def test_models_that_take_trees_are_distinguished_from_those_that_do_not(
    name: str,
) -> None:
    takes_trees(name, expected=name in TAKEN)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*census.BUILT} - {*census.EACH_KIND}))
def test_no_other_model_takes_trees_that_are_not_its_paths(name: str) -> None:
    takes_trees(name, expected=None)


def takes_trees(name: str, *, expected: bool | None) -> None:
    """Assert that a model is refused, or gives a tree the logits of its chains."""
    if census.BUILT[name].unequal:
        return  # refused for every draft
    model = census.build(name)
    with Hooks(model):
        try:
            check_tree_model(model, 255)
        except (UnsupportedModelError, UnsupportedCacheError):
            assert not expected
            return
        assert expected in (True, None)
        lane = Lane(model, sliding="slack")
        lane.feed(PROMPT[:-1])
        lane.run = TreeForward(model)
        with (
            lane.begin() as lane_round,
            tree_forward(tree_rows(mx.array(PARENTS), levels=6)),
        ):
            tree_logits = lane_round.forward(mx.array([PROMPT[-1], *NODES]))[1:]
            mx.eval(tree_logits)
    wanted = by_chains(model, PROMPT)
    finite = mx.isfinite(wanted)
    assert mx.allclose(
        mx.where(finite, tree_logits, 0), mx.where(finite, wanted, 0), atol=5e-3
    ).item()

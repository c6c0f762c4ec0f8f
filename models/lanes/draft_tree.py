"""Forwards over a tree of tokens: each row's position, and the rows that it sees.

Example: the root t, which is fed too, and nodes 0 to 3:

    t ─┬─ 0 ─── 1        rows      t  0  1  2  3
       └─ 2 ─── 3        parents   -  t  0  t  2      depths  0  1  2  1  2

Row i has the position offset + depths[i] and sees the committed rows, its ancestors and
itself. The caches' views make the masks (`caches.types.tree_view`). Hooks on rotary
embeddings apply the positions: the hooks put the rows on the batch axis, where mlx's
function takes an offset for each row.

A model can use positions in other ways too. So `check_tree_model` feeds a model a tree
and its paths, and refuses the model if rows differ.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import rope_utils
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation.caches import (
    Speculation,
    TreeRows,
    check_trees,
    tree_views,
    with_slack,
)
from mlx_speculation.errors import UnsupportedModelError
from mlx_speculation.models.instance_hooks import Hook, Hooked, derived, plain_class
from mlx_speculation.models.lanes.single import LaneRound
from mlx_speculation.models.round_context import rows_of_a_round

_ROPES = (
    nn.RoPE,
    rope_utils.Llama3RoPE,
    rope_utils.ProportionalRoPE,
    rope_utils.SuScaledRoPE,
    rope_utils.YarnRoPE,
)
_RANK = 2  # outside of all other hooks

# Models that scale attention by position, but only beyond the positions of the check.
_SCALED = frozenset(
    f"mlx_lm.models.{name}" for name in ("llama4", "ministral3", "mistral4")
)

# The check's number of known tokens, and the parents of the nodes of its tree. The last
# rows have small depths, so their positions are much smaller than their indices.
_PROMPT, _PARENTS = 9, (-1, -1, -1, 0, 1, 1, 4, 4, 6, 2, 9, 10)
# The bound on differences of rows, in standard deviations of their logits: `_TIMES`
# times the difference that rounding makes, but at least `_LEAST_HALF` in half precision
# and `_LEAST` in float32, and at most `_MOST`. A row at a wrong position differs by 3.
# A correct model of 30 layers in bfloat16 on an H100 differs by 0.24.
_TIMES, _LEAST_HALF, _LEAST, _MOST = 16, 0.5, 2e-3, 0.5


class _Fed:
    """The tree of one forward, and the positions that its layers share."""

    __slots__ = ("_places", "rows")

    def __init__(self, rows: TreeRows) -> None:
        self.rows = rows
        self._places: dict[int, mx.array] = {}

    def places(self, offset: int) -> mx.array:
        """Return the rows' positions, int32 [rows]; the first has position `offset`."""
        if offset not in self._places:
            self._places[offset] = self.rows.depths + offset
        return self._places[offset]


_tree: ContextVar[_Fed | None] = ContextVar("tree", default=None)


def tree_rows(parents: mx.array, levels: int, lead: int = 1) -> TreeRows:
    """Return the rows that each row of a tree sees, and the depths of the rows.

    `lead` tokens (at least 1) are fed as a chain before the nodes, so there are lead +
    nodes rows. The first has depth 0. `parents`, int32 [nodes], has the parent of each
    node, smaller than the node. -1 means the last token of the chain. `levels` is at
    least the number of steps from any node to the last token of the chain.
    """
    chain = mx.arange(-1, lead - 1, dtype=mx.int32)
    above = mx.concatenate([chain, parents.astype(mx.int32) + lead])
    count = above.shape[0]
    ranks = mx.arange(count, dtype=mx.int32)
    seen = ((ranks[None] == above[:, None]) | mx.eye(count, dtype=mx.bool_)).astype(
        mx.float32
    )
    reach = 1  # steps towards the root that are followed
    while reach < levels + lead - 1:
        seen, reach = mx.minimum(seen @ seen, 1.0), 2 * reach
    depths = seen.sum(axis=1).astype(mx.int32) - 1
    return TreeRows(seen > 0, depths)


@functools.cache
def _by_depth(kind: Any) -> type[nn.Module]:
    """Return a class of rotary embeddings that rotates rows of a tree by depth."""

    def call(self: nn.Module, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        fed = _tree.get()
        if fed is None:
            plain: mx.array = kind.__call__(self, x, *args, **kwargs)
            return plain
        return _turned(kind.__call__, self, x, fed, *args, **kwargs)

    return derived(kind, {"__call__": call})


def _turned(
    call: Any, rope: nn.Module, x: mx.array, fed: _Fed, offset: int = 0
) -> mx.array:
    """Rotate x [1, heads, rows, dim], each row by its own position."""
    rows = fed.rows
    if x.ndim != 4 or x.shape[0] != 1 or x.shape[2] != rows.depths.shape[0]:
        raise UnsupportedModelError(
            f"A rotary embedding got shape {x.shape} in a forward over a tree of "
            f"{rows.depths.shape[0]} rows, but needs [1, heads, rows, dim]. Leave "
            "draft_tree out for this model."
        )
    by_row = x.transpose(2, 1, 0, 3)
    turned: mx.array = call(rope, by_row, offset=fed.places(offset))
    return turned.transpose(2, 1, 0, 3)


def _hooks(model: nn.Module) -> Iterator[tuple[nn.Module, Hook]]:
    for _, module in model.named_modules():
        if issubclass(plain_class(module), _ROPES):
            yield module, Hook(_RANK, _by_depth)


class TreeForward:
    """The forward of a lane's model; inside `tree_forward` the ids are a tree's rows.

    The model needs `TreeHooks`, and has to pass `check_tree_model`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model

    def __call__(self, ids: mx.array, cache: Sequence[Any]) -> mx.array:
        """Return logits [1, rows, vocab] of ids [1, rows]."""
        fed = _tree.get()
        if fed is not None:
            cache = tree_views(cache, fed.rows)
        result: mx.array = self._model(ids, cache=cache)
        return result


@contextmanager
def tree_forward(rows: TreeRows) -> Iterator[None]:
    """Inside the block, this thread builds a forward over a tree."""
    token = _tree.set(_Fed(rows))
    try:
        yield
    finally:
        _tree.reset(token)


def keep_path(lane_round: LaneRound, rows: Sequence[int], *, shown: bool) -> None:
    """Move these rows to the front of a round that has fed a tree.

    With `shown`, the rows of the round's hidden states are moved too.
    """
    lane_round.speculation.move(rows)
    if shown and [*rows] != [*range(len(rows))]:
        lane_round.hidden.take(rows)


class TreeHooks(Hooked):
    """The hooks on the rotary embeddings of one model, until `remove` is called."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(_hooks(model))


def check_tree_model(model: nn.Module, highest: int) -> None:
    """Refuse a model whose logits on a tree differ from those on the tree's paths.

    The model, with `TreeHooks` on it, is fed a tree, and each of its paths as a chain.
    `highest` is the largest token id.

    Raises:
        UnsupportedCacheError: the model's caches cannot hold trees.
        UnsupportedModelError: the logits differ by more than rounding.
    """
    check_trees(with_slack(make_prompt_cache(model)))
    _check_unscaled(model)
    ids = [(7 + 31 * i * i + 17 * i) % (highest + 1) for i in range(_PROMPT + 12)]
    known, nodes = ids[:_PROMPT], ids[_PROMPT:]
    tree = tree_rows(mx.array(_PARENTS), levels=5)

    half, forward = False, TreeForward(model)

    def fed(tokens: Sequence[int], tree: TreeRows | None = None) -> mx.array:
        nonlocal half
        caches = with_slack(make_prompt_cache(model))
        model(mx.array([known[:-1]]), cache=caches)
        branching = nullcontext() if tree is None else tree_forward(tree)
        with Speculation(caches) as opened, rows_of_a_round(), branching:
            logits = forward(mx.array([[known[-1], *tokens]]), cache=opened.caches)
            mx.eval(logits)
        half = logits.dtype != mx.float32
        rows: mx.array = logits[0].astype(mx.float32)
        return rows

    result, worst, rounding = fed(nodes, tree), 0.0, 0.0
    for leaf in sorted({*range(len(nodes))} - {*_PARENTS}):
        path = [leaf]
        while _PARENTS[path[0]] >= 0:
            path.insert(0, _PARENTS[path[0]])
        chain = fed([nodes[i] for i in path])
        longer = fed([*(nodes[i] for i in path), *nodes])[: len(chain)]
        picked = result[mx.array([0, *(i + 1 for i in path)])]
        worst = max(worst, _difference(picked, chain))
        rounding = max(rounding, _difference(longer, chain))
    least = _LEAST_HALF if half else _LEAST
    if worst > min(max(_TIMES * rounding, least), _MOST):
        raise UnsupportedModelError(
            f"draft_tree was passed, but {type(model).__module__} gives other logits "
            f"for a tree than for its paths: they differ by {worst:.2g} standard "
            f"deviations, of which rounding explains {rounding:.2g}. Leave draft_tree "
            "out for this model."
        )


def _check_unscaled(model: nn.Module) -> None:
    for each in model.modules():
        if plain_class(each).__module__ in _SCALED:
            raise UnsupportedModelError(
                f"draft_tree was passed, but {plain_class(each).__module__} scales its "
                "attention by the place of a row in the cache, which in a tree is not "
                "the row's position. Leave draft_tree out for this model."
            )


def _difference(rows: mx.array, others: mx.array) -> float:
    """Return the largest difference of logits, in standard deviations of the logits."""
    finite = mx.isfinite(rows) & mx.isfinite(others)
    apart = mx.where(finite, mx.abs(rows - others), mx.where(rows == others, 0, mx.inf))
    scale = mx.std(mx.where(mx.isfinite(others), others, 0))
    result: Any = (apart.max() / mx.maximum(scale, 1e-6)).item()
    return float(result)

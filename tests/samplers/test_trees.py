"""Trees: their layout, the walk along the target's own choices, and its law."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.samplers.acceptance import count_accepted
from mlx_speculation.samplers.rules.probs import residual
from mlx_speculation.samplers.trees import TreeLayout, TreeVerdict, descend, tree_layout
from support.sampling.distribution_pairs import tables
from support.sampling.enumeration import EXACT, Array, Flags, Tables, chain_law
from support.sampling.tree_enumeration import (
    enumerate_coin_tree,
    enumerate_tree,
    likely_children,
    without_children,
)

# A vocabulary, and the parents of a tree in which no node has more children than that.
TREES = [
    (2, [-1, 0]),
    (2, [-1, 0, 0]),
    (2, [-1, 0, 1, 2, 3]),
    (2, [-1, 0, 0, 1, 1, 2, 2]),
    (3, [-1, 0, 0, 0, 1, 1, 2]),
    (3, [-1, 0, 1, 1, 3, 4, 3]),
    (4, [-1, 0, 0, 0]),
    (4, [-1, 0, 0, 1, 1, 3]),
    (4, [-1, 0, 1, 2, 3]),
    (4, [-1, 0, 0, 1, 2, 3]),
    (3, [-1, 0, 0, 1, 1, 3, 5]),
]


def depths_of(parents: list[int]) -> list[int]:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return depths


def walk(parents: list[int], tokens: list[int], choices: list[int]) -> list[int]:
    """The accepted nodes, one step after the other; of equal siblings the first."""
    path = [0]
    while True:
        for child, parent in enumerate(parents):
            if parent == path[-1] and tokens[child] == choices[path[-1]]:
                path.append(child)
                break
        else:
            return path


def check_walk(
    verdict: TreeVerdict, parents: list[int], tokens: list[int], choices: list[int]
) -> None:
    path = walk(parents, tokens, choices)
    deepest = max(depths_of(parents))
    assert verdict.accepted.item() == len(path) - 1
    padded = path + path[-1:] * (deepest + 1 - len(path))
    assert verdict.path.tolist() == padded
    assert verdict.emitted.tolist() == [choices[node] for node in padded]


@st.composite
def trees(draw: st.DrawFn, most: int = 12) -> list[int]:
    size = draw(st.integers(1, most))
    return [-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))]


def test_a_layout_is_what_its_docstring_shows() -> None:
    layout = tree_layout([-1, 0, 1, 1], 7, tokens=[50, 51, 52, 53])
    assert layout.parents.tolist() == [-1, 0, 1, 1]
    assert layout.positions.tolist() == [7, 8, 9, 9]
    assert layout.depths.tolist() == [0, 1, 2, 2]
    assert layout.depth == 2
    assert layout.mask.astype(mx.int32).tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 1, 1, 0],
        [1, 1, 0, 1],
    ]
    assert layout.attention_mask(2)[3].astype(mx.int32).tolist() == [1, 1, 1, 1, 0, 1]
    assert layout.attention_mask(0).shape == (4, 4)
    for array in (layout.parents, layout.positions, layout.depths):
        assert array.dtype == mx.int32
    assert layout.mask.dtype == layout.attention_mask(3).dtype == mx.bool_


@given(parents=trees(), cached=st.integers(0, 5), seed=st.integers(0, 100))
def test_a_node_attends_to_the_cache_and_to_what_leads_to_it(
    parents: list[int], cached: int, seed: int
) -> None:
    """Attention over the whole tree equals attention over each node's own path."""
    layout = tree_layout(parents, cached)
    keys = mx.random.split(mx.random.key(seed), 3)
    columns = cached + len(parents)
    k, v = (mx.random.normal((1, 1, columns, 8), key=key) for key in keys[:2])
    q = mx.random.normal((1, 1, len(parents), 8), key=keys[2])
    attend = mx.fast.scaled_dot_product_attention
    together = attend(q, k, v, scale=1.0, mask=layout.attention_mask(cached))
    for node in range(len(parents)):
        path: list[int] = []
        step = node
        while step != -1:
            path.insert(0, step)
            step = parents[step]
        seen = mx.array([*range(cached), *(cached + n for n in path)])
        assert layout.positions[node].item() == cached + len(path) - 1
        alone = attend(q[:, :, node, None], k[:, :, seen], v[:, :, seen], scale=1.0)
        assert mx.allclose(together[:, :, node, None], alone, atol=1e-5).item()


@pytest.mark.parametrize(
    ("parents", "match"),
    [
        ([], "has no nodes"),
        ([0], "parent of node 0 is 0, and -1 is needed"),
        ([1, -1], "parent of node 0 is 1"),
        ([-1, -1], "nodes 0 and 1 both have the parent -1"),
        ([-1, 0, -1], "nodes 0 and 2 both have the parent -1"),
        ([-1, 1], "parent of node 1 is 1. .* from 0 to 0"),
        ([-1, 0, 3, 0], "parent of node 2 is 3. .* from 0 to 1"),
        ([-1, 0, -2], "parent of node 2 is -2"),
    ],
)
def test_parents_that_make_no_tree_are_refused(parents: list[int], match: str) -> None:
    with pytest.raises(InvalidRequestError, match=match):
        tree_layout(parents, 0)


def test_tokens_that_do_not_fit_the_tree_are_refused() -> None:
    equal = "nodes 2 and 3 both continue node 1 with token 5"
    with pytest.raises(InvalidRequestError, match=equal):
        tree_layout([-1, 0, 1, 1], 0, tokens=[9, 9, 5, 5])
    with pytest.raises(InvalidRequestError, match="2 tokens and 3 parents"):
        tree_layout([-1, 0, 0], 0, tokens=[1, 2])
    with pytest.raises(InvalidRequestError, match="4 tokens and 3 parents"):
        tree_layout([-1, 0, 0], 0, tokens=[1, 2, 3, 4])
    with pytest.raises(InvalidRequestError, match="root_position is -1"):
        tree_layout([-1, 0], -1)
    tree_layout([-1, 0, 0, 1, 2], 0, tokens=[5, 5, 6, 6, 6])  # cousins may be equal


@pytest.mark.parametrize("shape", [(), (2,), (4,), (3, 2)])
def test_arrays_that_do_not_fit_the_tree_are_refused(shape: tuple[int, ...]) -> None:
    layout = tree_layout([-1, 0, 0], 0)
    good, bad = mx.zeros((3,), dtype=mx.int32), mx.zeros(shape, dtype=mx.int32)
    with pytest.raises(InvalidRequestError, match="tokens has the shape"):
        descend(layout, bad, good)
    with pytest.raises(InvalidRequestError, match="choices has the shape"):
        descend(layout, good, bad)


@given(parents=trees(), data=st.data(), vocab=st.integers(1, 4))
def test_the_walk_follows_the_targets_choices(
    parents: list[int], data: st.DataObject, vocab: int
) -> None:
    """Equal siblings included, which a small vocabulary makes."""
    ids = st.lists(
        st.integers(0, vocab - 1), min_size=len(parents), max_size=len(parents)
    )
    tokens, choices = data.draw(ids), data.draw(ids)
    layout = tree_layout(parents, 3)
    for dtype in (mx.uint32, mx.int32):
        given_tokens = mx.array(tokens, dtype=dtype)
        given_choices = mx.array(choices, dtype=mx.uint32)
        verdict = descend(layout, given_tokens, given_choices)
        check_walk(verdict, parents, tokens, choices)
        assert verdict.accepted.dtype == verdict.path.dtype == mx.int32
        assert verdict.emitted.dtype == mx.uint32 or dtype == mx.int32


@given(parents=trees(), seed=st.integers(0, 1000), vocab=st.integers(1, 3))
def test_a_tree_emits_what_plain_decoding_would(
    parents: list[int], seed: int, vocab: int
) -> None:
    """A choice for every prefix, as one noise gives: any tree emits a beginning of it.

    The tree's tokens are arbitrary, so they may as well depend on the noise.
    """
    draws = np.random.default_rng(seed)
    tokens = draws.integers(vocab, size=len(parents)).tolist()
    prefixes: list[tuple[int, ...]] = [()]
    for node, parent in enumerate(parents[1:], start=1):
        prefixes.append((*prefixes[parent], tokens[node]))
    plan: dict[tuple[int, ...], int] = {}

    def choice(prefix: tuple[int, ...]) -> int:
        return plan.setdefault(prefix, int(draws.integers(vocab)))

    choices = [choice(prefix) for prefix in prefixes]
    verdict = descend(tree_layout(parents, 0), mx.array(tokens), mx.array(choices))
    plain: list[int] = []
    for _ in range(int(np.array(verdict.accepted)) + 1):
        plain.append(choice(tuple(plain)))
    assert np.array(verdict.emitted)[: len(plain)].tolist() == plain


@given(k=st.integers(0, 6), seed=st.integers(0, 1000))
def test_a_chain_is_a_tree_of_one_path(k: int, seed: int) -> None:
    draws = np.random.default_rng(seed)
    drafted, choices = draws.integers(3, size=k), draws.integers(3, size=k + 1)
    root = np.array([0])
    tokens = mx.array(np.concatenate([root, drafted]))
    verdict = descend(tree_layout([*range(-1, k)], 4), tokens, mx.array(choices))
    expected = count_accepted(mx.array(drafted), mx.array(choices))
    assert mx.array_equal(verdict.accepted, expected).item()
    kept = int(np.array(expected)) + 1
    assert np.array(verdict.emitted)[:kept].tolist() == choices[:kept].tolist()
    assert np.array(verdict.path)[:kept].tolist() == list(range(kept))


def batch_of(parents: list[int], shape: tuple[int, ...]) -> tuple[mx.array, mx.array]:
    draws = np.random.default_rng(len(parents))
    both = draws.integers(2, size=(2, *shape, len(parents)))
    tokens, choices = (mx.array(part.astype(np.uint32)) for part in both)
    return tokens, choices


@pytest.mark.parametrize(("vocab", "parents"), TREES)
def test_batch_rows_descend_as_if_alone(vocab: int, parents: list[int]) -> None:
    layout = tree_layout(parents, 0)
    tokens, choices = batch_of(parents, (3, 4))
    together = descend(layout, tokens, choices)
    one_draft = descend(layout, tokens[0, 0], choices)
    one_choice = descend(layout, tokens, choices[0, 0])
    for index in np.ndindex(3, 4):
        for verdict, t, c in [
            (together, tokens[index], choices[index]),
            (one_draft, tokens[0, 0], choices[index]),
            (one_choice, tokens[index], choices[0, 0]),
        ]:
            row = TreeVerdict(
                verdict.accepted[index], verdict.path[index], verdict.emitted[index]
            )
            check_walk(row, parents, np.array(t).tolist(), np.array(c).tolist())


def test_nothing_is_read_on_the_host() -> None:
    """Tracing refuses any evaluation, so a walk that can be traced has none.

    What the trace returns is left alone: in mlx 0.32.4 a vectorized `|` of an argument
    with another array is wrong.
    """
    parents = [-1, 0, 0, 1, 1, 3]
    layout = tree_layout(parents, 0)

    def walked(t: mx.array, c: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        verdict = descend(layout, t, c)
        return verdict.accepted, verdict.path, verdict.emitted

    assert len(mx.vmap(walked)(*batch_of(parents, (5,)))) == 3

    def read(t: mx.array, c: mx.array) -> mx.array:
        descend(layout, t, c).accepted.item()
        return t

    with pytest.raises(ValueError, match="eval"):
        mx.vmap(read)(*batch_of(parents, (5,)))


def tree_laws(vocab: int, parents: list[int], seed: int) -> Tables:
    return tables(vocab, max(depths_of(parents)), seed)


def accepted_closed_form(parents: list[int], laws: Tables) -> Array:
    """A node is accepted when the target's text leads to it."""
    _, prefixes, depths = likely_children(parents, laws)
    rows = np.arange(laws.pairs)
    total = np.zeros(laws.pairs)
    for node in range(1, len(parents)):
        total += chain_law(laws.target[: depths[node]])[rows, prefixes[:, node]]
    return total


def check_tree(vocab: int, parents: list[int], seed: int) -> None:
    laws = tree_laws(vocab, parents, seed)
    ours = enumerate_tree(parents, laws)
    coin = enumerate_coin_tree(parents, laws, without_children)
    for outcome in (ours, coin):
        np.testing.assert_allclose(
            outcome.law, chain_law(laws.target), rtol=0, atol=EXACT
        )
        np.testing.assert_allclose(
            outcome.accepted, accepted_closed_form(parents, laws), rtol=0, atol=EXACT
        )


def test_at_least_200_pairs_of_laws_are_enumerated() -> None:
    assert sum(tree_laws(vocab, parents, 0).pairs for vocab, parents in TREES) >= 200


@pytest.mark.parametrize(("vocab", "parents"), TREES)
def test_a_tree_emits_the_targets_law(vocab: int, parents: list[int]) -> None:
    """And so does the rule of one coin per node: it accepts the same, in law."""
    check_tree(vocab, parents, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize(("vocab", "parents"), TREES)
def test_a_tree_emits_the_targets_law_for_many_pairs(
    vocab: int, parents: list[int]
) -> None:
    for seed in range(1, 21):
        check_tree(vocab, parents, seed)


def with_residual(target: Array, draft: Array, children: Flags) -> Array:
    """Wrong here: the law after a rejected draw, where none was drawn."""
    with mx.stream(mx.cpu):
        p, q = (mx.array(law, dtype=mx.float64) for law in (target, draft))
        return np.array(residual(p, q, mx.ones(len(target))))


@pytest.mark.parametrize(("vocab", "parents"), TREES[4:])
def test_the_child_rule_mixed_with_a_residual_is_seen(
    vocab: int, parents: list[int]
) -> None:
    laws = tables(vocab, max(depths_of(parents)), 1, ["spread"], each=8)
    law = enumerate_coin_tree(parents, laws, with_residual).law
    off = np.abs(law - chain_law(laws.target)).sum(-1) / 2
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(law, chain_law(laws.target), rtol=0, atol=EXACT)
    assert np.median(off) > 0.01


def test_a_layout_is_a_value_of_its_own() -> None:
    assert isinstance(tree_layout([-1], 0), TreeLayout)
    assert tree_layout([-1], 0) != tree_layout([-1], 0)  # arrays cannot tell
    alone = descend(tree_layout([-1], 0), mx.array([5]), mx.array([8]))
    assert len({alone, descend(tree_layout([-1], 0), *2 * [mx.array([5])])}) == 2
    assert alone.accepted.item() == 0
    assert alone.path.tolist() == [0]
    assert alone.emitted.tolist() == [8]

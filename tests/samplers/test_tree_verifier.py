"""The accepted path of a tree, row by row, and the children that a head proposes."""

import random
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_speculation.samplers import (
    Chooser,
    Rows,
    Sampling,
    Verifier,
    best_children,
    serves_trees,
    verify_tree,
)
from support.drafters.tree_drafter import path_to, random_parents

VOCAB = 40
KNOWN = [3, 1, 4, 1, 5]
SAMPLINGS = (
    Sampling(seed=0),
    Sampling(temperature=0.9, seed=2**40 + 7),
    Sampling(temperature=1.3, top_k=5, top_p=0.9, seed=3),
)


@given(
    data=st.randoms(use_true_random=False),
    sampling=st.sampled_from(SAMPLINGS),
    top=st.sampled_from((None, 2)),
)
def test_the_path_is_that_of_the_choices_after_each_prefix(
    data: random.Random, sampling: Sampling, top: int | None
) -> None:
    verifier = Verifier(Chooser(sampling, VOCAB))
    nodes, levels = data.randint(2, 12), data.randint(1, 5)
    parents = random_parents(data, nodes)
    depths = [len(path_to(parents, node)) for node in range(nodes)]
    logits = mx.random.normal(
        (nodes + 1, VOCAB), key=mx.random.key(data.getrandbits(31))
    )
    # The choice of plain decoding after a node: one row at its place in the text.
    choices = []
    for node, depth in zip(range(-1, nodes), [0, *depths], strict=True):
        known = [*KNOWN, *[9] * depth]
        row = verifier.verify(logits[node + 1 :][:1], Rows(known), top=top)
        choices.append(row)
    said: list[Any] = [each.tokens.item() for each in choices]
    tokens = [
        said[parent + 1] if data.random() < 0.7 else data.randrange(VOCAB)
        for parent in parents
    ]
    path: list[int] = []
    while len(path) < levels:
        last = path[-1] if path else -1
        right = [
            node
            for node in range(nodes)
            if parents[node] == last and tokens[node] == said[last + 1]
        ]
        if not right:
            break
        path.append(right[0])
    paths: list[list[int]] = [[], *(path_to(parents, node) for node in range(nodes))]
    seen = [
        [column in (0, *(1 + i for i in paths[row])) for column in range(nodes + 1)]
        for row in range(nodes + 1)
    ]
    result = verify_tree(
        verifier,
        logits,
        Rows(KNOWN, mx.zeros(levels, mx.uint32), levels + 1),
        mx.array(tokens, mx.uint32),
        mx.array(parents, mx.int32),
        mx.array(seen),
        levels,
        top=top,
    )
    accepted: Any = result.verified.accepted
    count = int(accepted.item())
    texts: Any = result.verified.tokens.tolist()
    taken: Any = result.path.tolist()
    assert len(texts) == levels + 1
    assert count == len(path)
    assert taken[:count] == path
    assert texts[: count + 1] == [said[node + 1] for node in (-1, *path)]
    rows = [choices[node + 1] for node in (-1, *path)]
    for place, row in enumerate(rows if top else []):
        assert result.verified.log_probs is not None
        assert row.log_probs is not None
        for name in ("tokens", "top_ids", "top"):
            one = getattr(result.verified.log_probs, name)[place]
            assert mx.allclose(one, getattr(row.log_probs, name)[0], atol=1e-5)


@given(
    seed=st.integers(0, 2**20),
    sampling=st.sampled_from(SAMPLINGS),
    count=st.integers(1, 6),
    width=st.sampled_from((VOCAB, 5000)),
    reduced=st.booleans(),
)
def test_the_first_child_is_what_a_chain_would_propose(
    seed: int, sampling: Sampling, count: int, width: int, reduced: bool
) -> None:
    verifier = Verifier(Chooser(sampling, width))
    ids = mx.arange(1, width, 2) if reduced else None
    columns = width if ids is None else len(ids)
    logits = mx.random.normal((3, columns), key=mx.random.key(seed)) * 3
    rows = Rows(KNOWN, mx.zeros(2, mx.uint32))
    tokens, values = best_children(verifier, logits, rows, count, ids)
    assert tokens.shape == values.shape == (3, count)
    for row in range(3):
        alone = verifier.propose(logits[row : row + 1], rows, ids)
        assert tokens[row, 0].item() == alone.tokens.item()
        row_tokens: Any = tokens[row].tolist()
        assert len({*row_tokens}) == count
        likely: Any = values[row].tolist()
        assert likely == sorted(likely, reverse=True)
        assert float(mx.exp(values[row]).sum().item()) <= 1 + 1e-5  # type: ignore[arg-type]
    if sampling.greedy and width == VOCAB:
        best: Any = mx.argsort(-logits, axis=-1)[:, :count]
        expected = best if ids is None else ids[best]
        assert tokens.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("sampling", "served"),
    [
        (Sampling(temperature=1, top_p=0.5, min_p=0.1, seed=0), True),
        (Sampling(temperature=1, xtc_probability=0.1, seed=0), False),
        (Sampling(seed=0, presence_penalty=0.5), False),
        (Sampling(seed=0, logit_bias={3: 1.0}), False),
        (Sampling(seed=0, sampler=lambda row: mx.argmax(row, axis=-1)), False),
    ],
)
def test_requests_that_have_trees(sampling: Sampling, served: bool) -> None:
    assert serves_trees(Verifier(Chooser(sampling, VOCAB))) == served

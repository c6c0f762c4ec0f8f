"""Exact enumeration of trees: the law of what a walk emits, nothing sampled.

As in `support.sampling.enumeration`, with a tree in place of the drafts. Each node's
children are the most probable tokens of its draft law, one for each child that it has.
"""

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from mlx_speculation.samplers.trees import descend, tree_layout
from support.sampling.enumeration import (
    Array,
    Flags,
    Ids,
    Outcome,
    Tables,
    continued,
    sequences,
)

EndLaw = Callable[[Array, Array, Flags], Array]


def likely_children(parents: list[int], tables: Tables) -> tuple[Ids, Ids, list[int]]:
    """Fill a tree: each node's children are its draft law's most probable tokens.

    Returns:
        The tokens and the prefix numbers of the nodes, both [pairs, nodes], and the
        depths.
    """
    pairs, nodes = tables.pairs, len(parents)
    tokens = np.zeros((pairs, nodes), dtype=np.int64)
    prefixes = np.zeros_like(tokens)
    depths, born = [0], [0] * nodes
    rows = np.arange(pairs)
    for node, parent in enumerate(parents[1:], start=1):
        law = tables.draft[depths[parent]][rows, prefixes[:, parent]]
        order = np.argsort(-law, axis=-1, kind="stable")
        tokens[:, node] = order[:, born[parent]]
        born[parent] += 1
        prefixes[:, node] = prefixes[:, parent] * tables.vocab + tokens[:, node]
        depths.append(depths[parent] + 1)
    return tokens, prefixes, depths


def enumerate_tree(parents: list[int], tables: Tables) -> Outcome:
    """Enumerate the descent through a tree whose depth is the tables' k.

    The choices after different nodes are drawn apart here. With keyed choice siblings
    share their noise, but a walk meets one node of each depth.
    """
    vocab, pairs, nodes = tables.vocab, tables.pairs, len(parents)
    tokens, prefixes, depths = likely_children(parents, tables)
    choices = sequences(vocab, nodes)
    verdict = descend(
        tree_layout(parents, 0), mx.array(tokens[:, None]), mx.array(choices[None])
    )
    accepted, emitted_tokens = np.array(verdict.accepted), np.array(verdict.emitted)
    weights = np.ones((pairs, len(choices)))
    for node, depth in enumerate(depths):
        law = tables.target[depth][np.arange(pairs), prefixes[:, node]]
        weights *= law[:, choices[:, node]]
    rows = np.broadcast_to(np.arange(pairs)[:, None], accepted.shape)
    emitted = []
    prefix = np.zeros_like(accepted)
    for count in range(tables.k + 1):
        ends = np.zeros((pairs, vocab**count, vocab))
        here = accepted == count
        index = rows[here], prefix[here], emitted_tokens[..., count][here]
        np.add.at(ends, index, weights[here])
        emitted.append(ends)
        prefix = prefix * vocab + emitted_tokens[..., count]
    return Outcome(continued(tables.target, emitted), (weights * accepted).sum(-1))


def enumerate_coin_tree(parents: list[int], tables: Tables, end_law: EndLaw) -> Outcome:
    """Enumerate the rule of one coin per node, child x taken with the target's p(x).

    `end_law`, from the target's law, the draft's law and the mask of the children,
    gives the token where no child is taken. The right one is the target's law without
    the children; then the outcome is that of the descent.
    """
    vocab, pairs = tables.vocab, tables.pairs
    tokens, prefixes, depths = likely_children(parents, tables)
    rows = np.arange(pairs)
    mass = np.ones(tokens.shape)
    emitted = [np.zeros((pairs, vocab**d, vocab)) for d in range(tables.k + 1)]
    for node, depth in enumerate(depths):
        place = rows, prefixes[:, node]
        target = tables.target[depth][place]
        children = np.zeros((pairs, vocab), dtype=np.bool_)
        for child, parent in enumerate(parents):
            if parent == node:
                children[rows, tokens[:, child]] = True
                mass[:, child] = mass[:, node] * target[rows, tokens[:, child]]
        draft = tables.draft[depth][place] if depth < tables.k else target
        none = np.where(children, 0, target).sum(-1)
        law = end_law(target, draft, children) if children.any() else target
        emitted[depth][place] += (mass[:, node] * none)[:, None] * law
    return Outcome(continued(tables.target, emitted), mass[:, 1:].sum(-1))


def without_children(target: Array, draft: Array, children: Flags) -> Array:
    """The target's law without the children, normalized where anything is left."""
    left = np.where(children, 0, target)
    mass = left.sum(-1, keepdims=True)
    return left / np.where(mass > 0, mass, 1)

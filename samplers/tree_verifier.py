"""Verification of a drafted tree: the path of the target's own choices.

From the root the path goes on to the child whose token is the target's choice, and ends
where there is none. The choice of a node has the noise of its place in the text, so
siblings are judged with the same, and what is emitted are the target's own choices: the
text is that of plain decoding, whatever the tree is (keyed choice, or greedy).

    root t, choice a;  children a and b;  a's choice c, its children d and c
    path t a c, accepted 2, and the choice of c's row comes as the bonus
"""

from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_speculation.samplers.acceptance import (
    LogProbs,
    Verified,
    normalizers,
    peaks,
    reported,
)
from mlx_speculation.samplers.chooser import Chooser
from mlx_speculation.samplers.noise.gumbel import GumbelNoise
from mlx_speculation.samplers.row_context import Rows
from mlx_speculation.samplers.verifier import Verifier

FEW = 1024  # token ids that are sorted at once


class VerifiedTree(NamedTuple):
    """Decision on a tree, lazy."""

    verified: Verified  # of the levels of a tree, as of a chain with so many tokens
    path: mx.array  # int32 [levels], the accepted nodes, then anything


class _NoiseOfNodes:
    """The noise of consecutive positions, for rows that stand at any of them."""

    def __init__(self, noise: GumbelNoise, depths: mx.array) -> None:
        self._noise, self._depths = noise, depths

    def prefers_few(self, count: int) -> bool:
        """Return False: all ids of these few positions are drawn."""
        return False

    def rows(self, positions: Sequence[int]) -> mx.array:
        """Return the noise of each row's position, float32 [rows, width]."""
        return self._noise.rows(positions)[self._depths]


def serves_trees(verifier: Verifier) -> bool:
    """Return whether a request's choices follow from row and position alone.

    Those of processors and samplers of the user's do not, and the rules of rejection
    and block verification judge chains. XTC is left out for its coins.
    """
    alone = verifier.shared is None
    return not alone and verifier.chooser.sampling.xtc_probability == 0


def verify_tree(
    verifier: Verifier,
    logits: mx.array,  # [1 + nodes, vocab], the root's first
    rows: Rows,  # the root's and those of a chain of `levels` tokens behind it
    tokens: mx.array,  # uint32 [nodes]
    parents: mx.array,  # int32 [nodes], -1: the root
    seen: mx.array,  # bool [1 + nodes, 1 + nodes], the ancestors of each, and itself
    levels: int,  # no node is accepted that is deeper
    *,
    top: int | None = None,  # see `Verifier.verify`
) -> VerifiedTree:
    """Choose from every row, and find the path of these choices. For `serves_trees`."""
    depths = seen.astype(mx.int32).sum(axis=1) - 1  # 0: the root
    places = mx.minimum(depths, levels)
    chooser: Any = copy(verifier.chooser)
    chooser._noise = _NoiseOfNodes(chooser._noise, places)
    processed = chooser.processed(logits, rows)
    choices = chooser.pick(processed, rows)
    # Of equal siblings the first is taken.
    equal = (tokens[:, None] == tokens) & (parents[:, None] == parents)
    others = (equal & mx.tri(len(tokens), k=-1, dtype=mx.bool_)).any(axis=1)
    agree = (tokens == choices[parents + 1]) & ~others
    agree = mx.concatenate([mx.array([True]), agree])
    taken = ~(seen & ~agree[None]).any(axis=1)
    on_path = taken[None] & (depths[None] == mx.arange(1, levels + 1)[:, None])
    result = mx.argmax(on_path, axis=1).astype(mx.int32)  # [levels], rows
    accepted = on_path.any(axis=1).astype(mx.int32).sum()
    path = mx.concatenate([mx.array([0], mx.int32), result])
    normals = peaks(processed) if top is None else normalizers(processed)
    report = None
    if top is not None:
        whole = verifier.whole_rows
        report = _taken(reported(processed, normals, choices, top, whole=whole), path)
    verified = Verified(choices[path], accepted, normals[path], report)
    return VerifiedTree(verified, result - 1)


def _taken(report: LogProbs, rows: mx.array) -> LogProbs:
    whole = None if report.rows is None else report.rows[rows]
    few = report.tokens[rows], report.top_ids[rows], report.top[rows]
    return LogProbs(*few, whole)


def best_children(
    verifier: Verifier,
    logits: mx.array,  # [rows, vocab] of the drafter, or [rows, n] with `ids`
    rows: Rows,  # one, of the token that all rows propose
    count: int,
    ids: mx.array | None = None,  # see `Verifier.propose`
) -> tuple[mx.array, mx.array]:
    """Return the most likely choices of the target after each row.

    With a temperature these are the best with the noise of their position, which is
    the target's own.

    Returns:
        Token ids, uint32 [rows, count], the best first, which is the one that `propose`
        would choose; and how likely they are, float32 [rows, count], logarithms. With
        many ids the others are the best of different parts of the vocabulary.
    """
    chooser: Chooser = verifier.draft_chooser
    scores = logits
    if ids is None:
        scores = chooser.processed(logits, rows, for_draft=True)
    if not chooser.sampling.greedy:
        noise = chooser.noise(rows.positions)
        noise = noise[:, : scores.shape[-1]] if ids is None else noise[:, ids]
        scores = chooser.log_probs(scores, rows) + noise
    scores = scores.astype(mx.float32)
    total = mx.logsumexp(scores, axis=-1, keepdims=True)
    tokens: mx.array | None = None
    width = scores.shape[-1]
    if width > FEW:
        parts = -(-width // FEW)
        room = [(0, 0), (0, parts * FEW - width)]
        each = mx.pad(scores, room, constant_values=-mx.inf)
        each = each.reshape(len(scores), parts, FEW)
        tokens = mx.argmax(each, axis=1) * FEW + mx.arange(FEW, dtype=mx.uint32)
        scores = each.max(axis=1)
    order = mx.argsort(-scores, axis=-1)[:, :count]
    values = mx.take_along_axis(scores, order, axis=-1) - total
    if tokens is not None:
        order = mx.take_along_axis(tokens, order, axis=-1)
    return (order if ids is None else ids[order]).astype(mx.uint32), values

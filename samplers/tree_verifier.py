"""Verification of a drafted tree: the path of the target's own choices.

From each node the path goes to the child with the token that the target chooses there,
and ends if there is no such child. A choice uses the noise of its position in the text,
so siblings share their noise. All emitted tokens are the target's own choices, so every
tree gives the text of plain decoding.

    root t has the children a and b, and the target's choice there is a
    node a has the children d and c, and the target's choice there is c
    path t a c: 2 tokens are accepted, and the choice at c is the bonus
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

    verified: Verified  # as for a chain that has one token for each level of the tree
    path: mx.array  # int32 [levels], the accepted nodes; later values mean nothing


class _NoiseOfNodes:
    """The noise of consecutive positions, for rows at any of these positions."""

    def __init__(self, noise: GumbelNoise, depths: mx.array) -> None:
        self._noise, self._depths = noise, depths

    def rows(self, positions: Sequence[int]) -> mx.array:
        """Return the noise of each row's position, float32 [rows, width]."""
        return self._noise.rows(positions)[self._depths]


def serves_trees(verifier: Verifier) -> bool:
    """Return whether a row and its position determine what a request chooses."""
    # `shared` is None with processors (logit bias and penalties included), with the
    # user's sampler, and with rejection and block verification, which decide on chains
    # only. XTC draws its random numbers for the rows of a chain.
    more = verifier.shared is None  # choices depend on more
    return not more and verifier.chooser.sampling.xtc_probability == 0


def verify_tree(
    verifier: Verifier,
    logits: mx.array,  # [1 + nodes, vocab], the root's row first
    rows: Rows,  # of the root and of a chain of `levels` tokens after it
    tokens: mx.array,  # uint32 [nodes]
    parents: mx.array,  # int32 [nodes], -1: the root
    seen: mx.array,  # bool [1 + nodes, 1 + nodes], each node's ancestors and itself
    levels: int,  # deeper nodes are not accepted
    *,
    top: int | None = None,  # see `Verifier.verify`
) -> VerifiedTree:
    """Choose from every row, and find the path of the choices. Needs `serves_trees`."""
    depths = seen.astype(mx.int32).sum(axis=1) - 1  # 0: the root
    places = mx.minimum(depths, levels)
    chooser: Any = copy(verifier.chooser)
    chooser._noise = _NoiseOfNodes(chooser._noise, places)
    processed = chooser.processed(logits, rows)
    choices = chooser.pick(processed, rows)
    # Of siblings with the same token only the first can be accepted.
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
    rows: Rows,  # one row: all rows of logits propose for the same position
    count: int,
    ids: mx.array | None = None,  # see `Verifier.propose`
) -> tuple[mx.array, mx.array]:
    """Return the most likely choices of the target after each row, the best first.

    These are token ids, uint32 [rows, count], and the log-softmax of their scores,
    float32 [rows, count]. In sampling, the scores include the noise. The first id is
    the choice of `Verifier.propose`. Of columns whose indices are equal modulo `FEW`,
    at most the best is returned.
    """
    chooser: Chooser = verifier.draft_chooser
    scores = logits
    if ids is None:
        scores = chooser.processed(logits, rows, for_draft=True)
    if not chooser.sampling.greedy:  # the target uses the same noise
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

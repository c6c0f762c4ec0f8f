"""Decisions for all requests of a round, grouped into few calls.

The logits of a batch are [requests, n, vocab]: a request has one row for its last known
token and one for each drafted token, and is padded to n rows. One call decides all
requests with equal `Verifier.shared` and `top`, whatever their seeds, positions and
masks. The result is the same to the last bit as if each were decided alone. All other
requests are decided one after the other.

This module evaluates no array and reads none.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_speculation.samplers.acceptance import (
    Decided,
    Group,
    Verified,
    count_accepted,
    in_order,
    normalizers,
    peaks,
    reported,
)
from mlx_speculation.samplers.chooser import Chooser, tempered
from mlx_speculation.samplers.row_context import Rows
from mlx_speculation.samplers.verifier import Verifier, spread


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """Inputs of the decision for one request."""

    verifier: Verifier
    rows: Rows  # the tokens before each of the request's k + 1 rows
    drafted: mx.array | None = None  # uint32 [k], the drafted tokens; None for k = 0
    # float32 [k, ids], what the drafted tokens were drawn from; None: no draws
    draft_probs: mx.array | None = None
    # Report log-probabilities, with this many of the most probable ids; None: no report
    top: int | None = None


def decide(
    requests: Sequence[Ask], logits: mx.array, drafted: mx.array | None = None
) -> Decided:
    """Decide for every request.

    `logits` are the target's [requests, n, vocab]; padding follows a request's rows.
    `drafted` is uint32 [requests, n - 1], padded with any tokens; None for n = 1.
    """
    groups: list[Group] = []
    failed: dict[int, Exception] = {}
    for key, members in _grouped(requests).items():
        if key is not None:
            groups.append(_together(requests, members, logits, drafted))
            continue
        for index in members:
            one = requests[index]
            rows = logits[index, : one.rows.count]
            try:
                verified = one.verifier.verify(
                    rows, one.rows, one.drafted, one.draft_probs, top=one.top
                )
                groups.append(Group((index,), verified))
            except Exception as error:
                failed[index] = error
    return Decided(tuple(groups), failed)


class Proposed(NamedTuple):
    """The next drafted token of every request."""

    tokens: mx.array  # uint32 [requests], 0 for a request that failed
    # By request, the distribution that its token was drawn from, float32 [1, ids]; only
    # for requests whose token was drawn
    probs: dict[int, mx.array]
    failed: dict[int, Exception]  # by request, its error


def propose_all(
    requests: Sequence[Ask],
    positions: Sequence[int],
    logits: mx.array,
    ids: mx.array | None = None,
) -> Proposed:
    """Choose the next drafted token of every request.

    Args:
        requests: the inputs of each request for one row; all share one target. For
            requests that are decided together, `rows` can lack the preceding tokens.
        positions: the position of the token that each request chooses.
        logits: [requests, vocab] of a draft, or [requests, n] with `ids`.
        ids: uint32 [n], the token ids of the columns, for a draft with a reduced
            vocabulary.
    """
    if ids is not None:
        logits = spread(logits, ids, requests[0].verifier.chooser.width)
    tokens: list[mx.array] = []
    order: list[int] = []
    probs: dict[int, mx.array] = {}
    failed: dict[int, Exception] = {}
    for key, members in _grouped(requests).items():
        order += members
        if key is not None:
            choosers, places = [], []
            for index in members:
                choosers.append(requests[index].verifier.draft_chooser)
                places.append(positions[index])
            rows = (
                logits if len(members) == len(requests) else logits[mx.array(members)]
            )
            tokens.append(_picked(choosers, choosers[0].usable(rows, _ANY), places))
            continue
        for index in members:
            one, row = requests[index], logits[index : index + 1]
            try:
                chosen = one.verifier.propose(row, one.rows)
            except Exception as error:
                failed[index] = error
                tokens.append(mx.zeros((1,), mx.uint32))
                continue
            tokens.append(chosen.tokens)
            if chosen.probs is not None:
                probs[index] = chosen.probs
    return Proposed(in_order(tokens, order), probs, failed)


_ANY = Rows((0,))  # deciding together does not read the tokens before a row


def _grouped(requests: Sequence[Ask]) -> dict[Any, list[int]]:
    """Return indexes of requests by shared options; key None: decided alone."""
    groups: dict[Any, list[int]] = {}
    for index, one in enumerate(requests):
        shared = one.verifier.shared
        key = None if shared is None else (shared, one.top)
        groups.setdefault(key, []).append(index)
    return groups


def _together(
    requests: Sequence[Ask],
    members: list[int],
    logits: mx.array,
    drafted: mx.array | None,
) -> Group:
    if len(members) < len(requests):
        requests, places = [requests[index] for index in members], mx.array(members)
        logits = logits[places]
        drafted = None if drafted is None else drafted[places]
    width, first, counts = logits.shape[1], requests[0], []
    choosers, drew = [], False
    for one in requests:  # one loop: faster than a comprehension for each list
        choosers.append(one.verifier.chooser)
        counts.append(one.rows.count - 1)
        drew = drew or one.drafted is not None
    rows = replace(_ANY, allowed=_masks(requests, width))
    processed = choosers[0].usable(logits.flatten(0, 1), rows)
    chance = not choosers[0].greedy
    starts = [one.rows.positions[0] for one in requests] if chance else []
    tokens = _picked(choosers, processed, starts)
    accepted = None
    if drafted is not None and drew:
        both = tokens.reshape(-1, width)
        accepted = count_accepted(drafted, both, mx.array(counts))
    normals = peaks(processed) if first.top is None else normalizers(processed)
    report = None
    if first.top is not None:
        whole = first.verifier.whole_rows
        report = reported(processed, normals, tokens, first.top, whole=whole)
    return Group(tuple(members), Verified(tokens, accepted, normals, report))


def _masks(requests: Sequence[Ask], width: int) -> mx.array | None:
    """Return the ids allowed in each row, bool [requests * width, ids]; None: all."""
    some = next((a.rows.allowed for a in requests if a.rows.allowed is not None), None)
    if some is None:
        return None
    parts = []
    for one in requests:
        mask, free = one.rows.allowed, width
        if mask is not None:
            parts.append(mask)
            free -= len(mask)
        if free:
            parts.append(mx.ones((free, some.shape[-1]), mx.bool_))
    return mx.concatenate(parts)


def _picked(
    choosers: Sequence[Chooser], processed: mx.array, starts: Sequence[int]
) -> mx.array:
    """Return the ids with the largest scores, uint32 [rows].

    There is one chooser for each request. The choosers differ in the seed only.
    `processed` [rows, ids] has all rows of one request, then those of the next.
    `starts` are the positions of each request's first row; not used if greedy.
    """
    sampling, width = choosers[0].sampling, len(processed) // len(choosers)
    if choosers[0].greedy:
        return mx.argmax(processed, axis=-1)
    each = zip(choosers, starts, strict=True)
    pairs = [(chooser, range(start, start + width)) for chooser, start in each]
    thrown = None
    if sampling.xtc_probability > 0:
        coins = [chooser.coins(place) for chooser, place in pairs]
        thrown = mx.concatenate([coin for coin in coins if coin is not None])
    noise = mx.concatenate([chooser.noise(place) for chooser, place in pairs])
    scores = tempered(processed, sampling, thrown)
    return mx.argmax(scores + noise[:, : scores.shape[-1]], axis=-1)

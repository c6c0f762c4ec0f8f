"""Decisions for the requests of a round, by one call where they have much in common.

A batch of requests brings logits [requests, n, vocab]: after the last known token of
each and after its drafted tokens, padded to n rows. Requests that differ in seed,
position and mask only are decided by one call over all their rows: the greedy ones, and
those of the same options whose noise is keyed and which have no processors. Each row is
chosen by itself, so it comes out the same to the last bit as alone. All others are
decided one request after the other, in the same evaluation.

Nothing here is evaluated or read.
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
    """What is to be decided for one request."""

    verifier: Verifier  # decides for it
    rows: Rows  # what precedes its rows, one more than it has drafts
    drafted: mx.array | None = None  # uint32 [k], its drafted tokens; None for k = 0
    # float32 [k, ids], what they were drawn from, if by chance
    draft_probs: mx.array | None = None
    # Report log-probabilities, and this many of the most probable ids
    top: int | None = None


def decide(
    asked: Sequence[Ask], logits: mx.array, drafted: mx.array | None = None
) -> Decided:
    """Decide for every request.

    Args:
        asked: what each of them asks.
        logits: [requests, n, vocab] of the target; of each, the rows it asks for come
            first.
        drafted: uint32 [requests, n - 1], padded with any tokens; None for n = 1.
    """
    groups: list[Group] = []
    failed: dict[int, Exception] = {}
    for members, together in _grouped(asked):
        if together:
            groups.append(_together(asked, members, logits, drafted))
            continue
        for index in members:
            one = asked[index]
            own = logits[index, : one.rows.count]
            try:
                verified = one.verifier.verify(
                    own, one.rows, one.drafted, one.draft_probs, top=one.top
                )
                groups.append(Group((index,), verified))
            except Exception as error:
                failed[index] = error
    return Decided(tuple(groups), failed)


class Proposed(NamedTuple):
    """The next drafted token of every request."""

    tokens: mx.array  # uint32 [requests], 0 where a request failed
    # What it was drawn from, float32 [1, ids], by request; missing where chance took no
    # part.
    probs: dict[int, mx.array]
    # What was raised, such as by a processor of the request's own.
    failed: dict[int, Exception]


def propose_all(
    asked: Sequence[Ask],
    positions: Sequence[int],
    logits: mx.array,
    ids: mx.array | None = None,
) -> Proposed:
    """Choose the next drafted token of every request.

    Args:
        asked: what each of them asks, for one row; all are of one target. What is
            ahead may be left out of those that have much in common.
        positions: of the token that each chooses.
        logits: [requests, vocab] of a draft, or [requests, n] with `ids`.
        ids: uint32 [n], different token ids, where the draft has logits for some only;
            see `Verifier.propose`.
    """
    if ids is not None:
        logits = spread(logits, ids, asked[0].verifier.chooser.width)
    tokens: list[mx.array] = []
    order: list[int] = []
    probs: dict[int, mx.array] = {}
    failed: dict[int, Exception] = {}
    for members, together in _grouped(asked):
        order += members
        if together:
            choosers = [asked[i].verifier.draft_chooser for i in members]
            places = [range(positions[i], positions[i] + 1) for i in members]
            rows = logits if len(members) == len(asked) else logits[mx.array(members)]
            tokens.append(_picked(choosers, choosers[0].usable(rows, _ANY), places))
            continue
        for index in members:
            one, row = asked[index], logits[index : index + 1]
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


_ANY = Rows((0,))  # what precedes a row does not matter to those decided together


def _grouped(asked: Sequence[Ask]) -> list[tuple[list[int], bool]]:
    """Return the requests by what they have in common, and whether they have any."""
    groups: dict[Any, list[int]] = {}
    for index, one in enumerate(asked):
        shared = one.verifier.shared
        key = None if shared is None else (shared, one.top)
        groups.setdefault(key, []).append(index)
    return [(members, key is not None) for key, members in groups.items()]


def _together(
    asked: Sequence[Ask],
    members: list[int],
    logits: mx.array,
    drafted: mx.array | None,
) -> Group:
    """Decide for requests that differ in seed, position and mask only."""
    ours = [asked[index] for index in members]
    if len(ours) < len(asked):
        places = mx.array(members)
        logits = logits[places]
        drafted = None if drafted is None else drafted[places]
    width, first = logits.shape[1], ours[0]
    choosers = [one.verifier.chooser for one in ours]
    starts = [one.rows.positions[0] for one in ours]
    rows = replace(_ANY, allowed=_masks(ours, width))
    processed = choosers[0].usable(logits.flatten(0, 1), rows)
    tokens = _picked(choosers, processed, [range(s, s + width) for s in starts])
    accepted = None
    if drafted is not None and any(one.drafted is not None for one in ours):
        counts = mx.array([one.rows.count - 1 for one in ours])
        accepted = count_accepted(drafted, tokens.reshape(-1, width), counts)
    normals = peaks(processed) if first.top is None else normalizers(processed)
    report = None
    if first.top is not None:
        whole = first.verifier.whole_rows
        report = reported(processed, normals, tokens, first.top, whole=whole)
    return Group(tuple(members), Verified(tokens, accepted, normals, report))


def _masks(asked: Sequence[Ask], width: int) -> mx.array | None:
    """Return what rows may choose, bool [requests * width, ids]; None: all may all."""
    some = next((a.rows.allowed for a in asked if a.rows.allowed is not None), None)
    if some is None:
        return None
    parts = []
    for one in asked:
        mask, free = one.rows.allowed, width
        if mask is not None:
            parts.append(mask)
            free -= len(mask)
        if free:
            parts.append(mx.ones((free, some.shape[-1]), mx.bool_))
    return mx.concatenate(parts)


def _picked(
    choosers: Sequence[Chooser], processed: mx.array, positions: Sequence[range]
) -> mx.array:
    """Return the ids with the largest scores, uint32 [rows].

    Args:
        choosers: of requests whose options are the same but for the seed.
        processed: [rows, ids], the rows of each request one after the other.
        positions: of the rows of each.
    """
    sampling = choosers[0].sampling
    if sampling.greedy:
        return mx.argmax(processed, axis=-1)
    pairs = list(zip(choosers, positions, strict=True))
    thrown = None
    if sampling.xtc_probability > 0:
        each = [chooser.coins(place) for chooser, place in pairs]
        thrown = mx.concatenate([coins for coins in each if coins is not None])
    noise = mx.concatenate([chooser.noise(place) for chooser, place in pairs])
    scores = tempered(processed, sampling, thrown)
    return mx.argmax(scores + noise[:, : scores.shape[-1]], axis=-1)

"""Decisions for many requests at once, on the rows of one forward.

A batch of requests brings logits [requests, n, vocab]: after the last known token of
each and after its drafted tokens, padded to n rows. Requests that differ in seed and
position only are decided by one call over all their rows: the greedy ones, and those
of the same options whose noise is keyed and which have no processors. Each row is
chosen by itself, so it comes out the same to the last bit as alone. All others are
decided one request after the other, in the same evaluation.

Nothing here is evaluated or read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from mlx_speculation.samplers.acceptance import Verified, normalizers, peaks
from mlx_speculation.samplers.chooser import Chooser, tempered
from mlx_speculation.samplers.row_context import Rows
from mlx_speculation.samplers.verifier import Verifier, reported, spread


@dataclass(frozen=True, slots=True, eq=False)
class VerifyRequest:
    """What is to be decided for one request."""

    verifier: Verifier  # decides for it
    rows: Rows  # what precedes its rows, one more than it has drafts
    drafted: mx.array | None = None  # uint32 [k], its drafted tokens; None for k = 0
    # float32 [k, ids], what they were drawn from, if by chance
    draft_probs: mx.array | None = None
    # Report log-probabilities, and this many of the most probable ids
    top: int | None = None

    @property
    def count(self) -> int:
        """How many tokens were drafted."""
        return self.rows.count - 1


@dataclass(frozen=True, slots=True, eq=False)
class VerifiedGroup:
    """Requests that were decided together."""

    members: tuple[int, ...]  # which of those that asked
    width: int  # how many rows each of them has in `verified`
    # Their rows one after the other; `accepted` is int32 [members], or None where
    # nothing was drafted
    verified: Verified


@dataclass(frozen=True, slots=True, eq=False)
class BatchVerified:
    """What was decided in a round."""

    decided: tuple[VerifiedGroup, ...]  # of those requests that could be decided
    # What was raised for others, such as by a processor of their own
    failed: dict[int, Exception]

    @property
    def arrays(self) -> list[mx.array]:
        """All there is to evaluate."""
        return [array for one in self.decided for array in one.verified.arrays]

    def first_tokens(self, count: int) -> mx.array:
        """Return the first chosen token of each of `count` requests, uint32 [count].

        Those that failed get token 0.
        """
        tokens, order = [mx.zeros((len(self.failed),), mx.uint32)], [*self.failed]
        for one in self.decided:
            tokens.append(one.verified.tokens[:: one.width])
            order += one.members
        assert len(order) == count
        return _in_order([t for t in tokens if t.shape[0]], order)


@dataclass(frozen=True, slots=True, eq=False)
class BatchProposed:
    """The next drafted token of every request."""

    tokens: mx.array  # uint32 [requests], 0 where a request failed
    # What it was drawn from, float32 [1, ids], by request; missing where chance took no
    # part.
    probs: dict[int, mx.array]
    # What was raised, such as by a processor of the request's own.
    failed: dict[int, Exception]


def verify_batch(
    asked: Sequence[VerifyRequest], logits: mx.array, drafted: mx.array | None = None
) -> BatchVerified:
    """Decide for every request.

    Args:
        asked: what each of them asks.
        logits: [requests, n, vocab] of the target; of each, the rows it asks for come
            first.
        drafted: uint32 [requests, n - 1], padded with any tokens; None for n = 1.
    """
    found: list[VerifiedGroup] = []
    failed: dict[int, Exception] = {}
    for members, key in _grouped(asked):
        if key is not None:
            found.append(_together(asked, members, logits, drafted))
            continue
        for index in members:
            one = asked[index]
            own = logits[index, : one.rows.count]
            try:
                verified = one.verifier.verify(
                    own, one.rows, one.drafted, one.draft_probs, top=one.top
                )
            except Exception as error:
                failed[index] = error
            else:
                if verified.accepted is not None:
                    accepted = verified.accepted.reshape(1)
                    verified = replace(verified, accepted=accepted)
                found.append(VerifiedGroup((index,), one.rows.count, verified))
    return BatchVerified(tuple(found), failed)


def propose_batch(
    asked: Sequence[VerifyRequest], logits: mx.array, ids: mx.array | None = None
) -> BatchProposed:
    """Choose the next drafted token of every request.

    Args:
        asked: what each of them asks, for one row; all are of one target.
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
    for members, key in _grouped(asked):
        order += members
        if key is not None:
            choosers = [asked[i].verifier.chooser.for_drafts() for i in members]
            positions = [asked[i].rows.positions for i in members]
            rows = logits if len(members) == len(asked) else logits[mx.array(members)]
            tokens.append(_picked(choosers, choosers[0].usable(rows, _ANY), positions))
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
    return BatchProposed(_in_order(tokens, order), probs, failed)


def _in_order(tokens: list[mx.array], order: list[int]) -> mx.array:
    """Put tokens together that stand at these places."""
    joined = mx.concatenate(tokens) if len(tokens) > 1 else tokens[0]
    if order == list(range(len(order))):
        return joined
    return joined[mx.array(sorted(range(len(order)), key=order.__getitem__))]


_ANY = Rows((0,))  # what precedes a row does not matter to those decided together


def _grouped(asked: Sequence[VerifyRequest]) -> list[tuple[list[int], Any]]:
    """Return the requests by what they have in common; None: nothing."""
    groups: dict[Any, list[int]] = {}
    for index, one in enumerate(asked):
        shared = one.verifier.shared
        key = None if shared is None else (shared, one.top)
        groups.setdefault(key, []).append(index)
    return [(members, key) for key, members in groups.items()]


def _together(
    asked: Sequence[VerifyRequest],
    members: list[int],
    logits: mx.array,
    drafted: mx.array | None,
) -> VerifiedGroup:
    """Decide for requests that differ in seed and position only."""
    ours = [asked[index] for index in members]
    if len(ours) < len(asked):
        places = mx.array(members)
        logits = logits[places]
        drafted = None if drafted is None else drafted[places]
    width = logits.shape[1]
    first = ours[0]
    choosers = [one.verifier.chooser for one in ours]
    starts = [one.rows.positions[0] for one in ours]
    processed = choosers[0].usable(logits.flatten(0, 1), _ANY)
    tokens = _picked(choosers, processed, [range(s, s + width) for s in starts])
    accepted = None
    if drafted is not None and any(one.count for one in ours):
        counts = mx.array([one.count for one in ours])
        agree = drafted == tokens.reshape(-1, width)[:, :-1]
        agree = agree & (mx.arange(width - 1) < counts[:, None])
        accepted = mx.cumprod(agree.astype(mx.int32), axis=-1).sum(axis=-1)
        accepted = accepted.astype(mx.int32)
    top = first.top
    normals = peaks(processed) if top is None else normalizers(processed)
    report = None
    if top is not None:
        report = reported(
            processed, normals, tokens, top, whole=first.verifier.whole_rows
        )
    return VerifiedGroup(
        tuple(members), width, Verified(tokens, accepted, normals, report)
    )


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

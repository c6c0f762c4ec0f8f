"""Acceptance of drafted tokens, and the results of a choice.

The words used everywhere in this project:

    drafted     proposed by the drafter, k of them in a round
    accepted    drafted, and confirmed by the target; always a prefix
    correction  the target's own token in place of the first rejected token
    bonus       the target's own token after k accepted tokens
    emitted     accepted tokens and the correction or bonus, before any cut
    committed   kept for good; caches hold committed tokens only
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """Proposed tokens, and the distribution that each was drawn from."""

    tokens: mx.array  # uint32 [rows]
    # float32 [rows, ids], the exact distribution of each draw, by which the target
    # accepts or rejects; None if the tokens were chosen without noise, or with the
    # target's own noise (keyed choice)
    probs: mx.array | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Verified:
    """The target's decision on k drafted tokens, lazy."""

    # uint32 [k + 1]: the accepted tokens, then the correction or bonus; later tokens
    # mean nothing
    tokens: mx.array
    accepted: mx.array | None  # int32 []; None if nothing was drafted
    # [k + 1], not finite in rows where no token can be chosen; the rows' `peaks` if no
    # log-probabilities are asked for
    normalizers: mx.array
    log_probs: "LogProbs | None" = None  # None if not asked for

    @property
    def first(self) -> "Verified":
        """The decision on the first row alone."""
        report = self.log_probs
        if report is not None:
            report = report.first
        return Verified(self.tokens[:1], self.accepted, self.normalizers[:1], report)

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays to evaluate."""
        report = self.log_probs
        every = [self.tokens, self.normalizers]
        if self.accepted is not None:
            every.append(self.accepted)
        if report is not None:
            every += report.tokens, report.top_ids, report.top
        return every


@dataclass(frozen=True, slots=True, eq=False)
class LogProbs:
    """Log-probabilities as in mlx-lm: after processors, before filters and noise."""

    tokens: mx.array  # float32 [rows], of the chosen tokens
    top_ids: mx.array  # uint32 [rows, n], the most probable ids, most probable first
    top: mx.array  # float32 [rows, n], of `top_ids`
    # float32 [rows, ids], of all ids; None if not asked for
    rows: mx.array | None = None

    @property
    def first(self) -> "LogProbs":
        """The log-probabilities of the first row alone."""
        rows = None if self.rows is None else self.rows[:1]
        return LogProbs(self.tokens[:1], self.top_ids[:1], self.top[:1], rows)


class Group(NamedTuple):
    """Requests that were decided together."""

    members: tuple[int, ...]  # their indexes among the round's requests
    # All rows of one member, then those of the next; each member has equally many.
    # `accepted` is int32 [members], or a scalar for a request that was decided alone,
    # or None if nothing was drafted
    verified: Verified


class Decided(NamedTuple):
    """Decisions of a round."""

    groups: tuple[Group, ...]
    failed: dict[int, Exception]  # by request, its error

    def at(self, places: Sequence[int]) -> "Decided":
        """Return these decisions with request i renumbered as `places[i]`."""
        groups = []
        for members, verified in self.groups:
            groups.append(Group(tuple([places[i] for i in members]), verified))
        failed = {places[index]: error for index, error in self.failed.items()}
        return Decided(tuple(groups), failed)

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays to evaluate."""
        result: list[mx.array] = []
        for _, verified in self.groups:
            result += verified.arrays
        return result

    def first_tokens(self) -> mx.array:
        """Return each request's first token, uint32 [requests]; 0 if it failed."""
        tokens, order = [], [*self.failed]
        if self.failed:
            tokens.append(mx.zeros((len(order),), mx.uint32))
        for members, verified in self.groups:
            order += members
            tokens.append(verified.tokens[:: len(verified.tokens) // len(members)])
        return in_order(tokens, order)


def in_order(tokens: list[mx.array], order: list[int]) -> mx.array:
    """Join tokens and sort them by request; `order` has the request of each token."""
    joined = mx.concatenate(tokens) if len(tokens) > 1 else tokens[0]
    if order == list(range(len(order))):
        return joined
    return joined[mx.array(sorted(range(len(order)), key=order.__getitem__))]


def count_accepted(
    drafted: mx.array, choices: mx.array, counts: mx.array | None = None
) -> mx.array:
    """Count the drafted tokens before the first that is not the target's own choice.

    Draft and target choose with the same noise (keyed choice), or without any (greedy).
    The emitted tokens are always `choices[: accepted + 1]`, so the draft cannot change
    the text.

    `drafted` is uint32 [..., k], `choices` uint32 [..., k + 1], and the result int32
    [...]. `counts` [...] says how many tokens were drafted, if the rest of k is
    padding.
    """
    agree = drafted == choices[..., :-1]
    if counts is not None:
        agree = agree & (mx.arange(agree.shape[-1]) < counts[..., None])
    agree = agree.astype(mx.int32)
    return mx.cumprod(agree, axis=-1).sum(axis=-1).astype(mx.int32)


def normalizers(logits: mx.array) -> mx.array:
    """Return the logsumexp of each row: [rows, vocab] to [rows], of the logits' dtype.

    It is not finite if no token can be chosen: the row holds a NaN or plus infinity, or
    only minus infinity.
    """
    return mx.logsumexp(logits, axis=-1)


def peaks(logits: mx.array) -> mx.array:
    """Return the largest logit of each row: [rows, vocab] to [rows].

    It is NaN if the row holds a NaN, and finite exactly if the normalizer is. On a CPU
    it takes a fifth of the time of the normalizer.
    """
    largest = logits.max(axis=-1)
    if mx.default_device() == mx.cpu or mx.cuda.is_available():
        return largest  # NaN if the row holds one, as tests check
    nan = mx.array(mx.nan, logits.dtype)
    return mx.where(mx.isnan(logits).any(axis=-1), nan, largest)


def reported(
    processed: mx.array,
    normals: mx.array,
    tokens: mx.array,
    top: int,
    *,
    whole: bool,
) -> LogProbs:
    """Return the log-probabilities of chosen tokens and of the `top` most probable ids.

    Among equally probable ids the chosen token comes first. If it is as probable as the
    last of the `top` ids and not one of them, it replaces that id.
    """
    log_probs = (processed - normals[:, None]).astype(mx.float32)
    chosen = mx.take_along_axis(log_probs, tokens[:, None], axis=-1)[:, 0]
    top = min(top, log_probs.shape[-1])
    rows = log_probs if whole else None
    if top == 0:
        nothing = mx.zeros((len(tokens), 0))
        return LogProbs(chosen, nothing.astype(mx.uint32), nothing, rows)
    best = mx.argpartition(-log_probs, kth=top - 1, axis=-1)[:, :top]
    values = mx.take_along_axis(log_probs, best, axis=-1)
    order = mx.argsort(-values, axis=-1)
    best = mx.take_along_axis(best, order, axis=-1).astype(mx.uint32)
    values = mx.take_along_axis(values, order, axis=-1)
    return LogProbs(chosen, _chosen_first(best, values, tokens, chosen), values, rows)


def _chosen_first(
    ids: mx.array, values: mx.array, tokens: mx.array, chosen: mx.array
) -> mx.array:
    """Move each row's chosen token before the ids whose values equal its own."""
    tokens, chosen = tokens.astype(ids.dtype)[:, None], chosen[:, None]
    left_out = (ids != tokens).all(axis=-1, keepdims=True) & (values == chosen)
    places = mx.arange(ids.shape[-1])
    ids = mx.where(left_out & (places == len(places) - 1), tokens, ids)
    # An odd key, between the even keys of the other ids, so that keys differ.
    first = 2 * (values > chosen).sum(axis=-1, keepdims=True) - 1
    order = mx.argsort(mx.where(ids == tokens, first, 2 * places), axis=-1)
    return mx.take_along_axis(ids, order, axis=-1)

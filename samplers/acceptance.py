"""Acceptance of drafted tokens, and the results of a choice.

The words used everywhere in this project:

    drafted     proposed by the drafter, k of them in a round
    accepted    drafted, and confirmed by the target; always a prefix
    correction  the target's own token after a rejected one
    bonus       the target's own token after k accepted ones
    emitted     accepted tokens and the correction or bonus, before any cut
    committed   kept for good; caches hold committed tokens only
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """Proposed tokens, and the distribution that each was drawn from.

    Attributes:
        tokens: uint32 [rows].
        probs: float32 [rows, ids], exactly what the token was drawn from: the target
            accepts or rejects by it; None where chance took no part, or where it is the
            target's own noise (keyed choice).
    """

    tokens: mx.array
    probs: mx.array | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Verified:
    """The target's decision on k drafted tokens, lazy.

    Attributes:
        tokens: uint32 [k + 1]. The first `accepted + 1` are the accepted tokens and
            the correction or bonus; the others mean nothing.
        accepted: int32 []; None where nothing was drafted.
        normalizers: [k + 1], not finite where no token can be chosen; `peaks` in their
            place where no log-probabilities are asked for.
        log_probs: of `tokens`, and of the most probable ones; None if not asked for.
    """

    tokens: mx.array
    accepted: mx.array | None
    normalizers: mx.array
    log_probs: "LogProbs | None" = None

    @property
    def first(self) -> "Verified":
        """The decision on the first row alone."""
        report = self.log_probs
        if report is not None:
            report = report.first
        return Verified(self.tokens[:1], self.accepted, self.normalizers[:1], report)

    @property
    def arrays(self) -> list[mx.array]:
        """All there is to evaluate."""
        report = self.log_probs
        every = [self.tokens, self.normalizers]
        if self.accepted is not None:
            every.append(self.accepted)
        if report is not None:
            every += report.tokens, report.top_ids, report.top
        return every


@dataclass(frozen=True, slots=True, eq=False)
class LogProbs:
    """Log-probabilities as mlx-lm has them: processed, before filters and chance."""

    tokens: mx.array  # float32 [rows], of the chosen tokens
    top_ids: mx.array  # uint32 [rows, n], the most probable ids, most probable first
    top: mx.array  # float32 [rows, n], theirs
    # float32 [rows, ids], of all ids; None if not asked for
    rows: mx.array | None = None

    @property
    def first(self) -> "LogProbs":
        """Those of the first row alone."""
        rows = None if self.rows is None else self.rows[:1]
        return LogProbs(self.tokens[:1], self.top_ids[:1], self.top[:1], rows)


class Group(NamedTuple):
    """Requests that were decided together."""

    members: tuple[int, ...]  # which of those that asked
    # Their rows one after the other, as many of each; `accepted` is int32 [members], or
    # [] of one, or None where nothing was drafted
    verified: Verified


class Decided(NamedTuple):
    """Decisions of a round."""

    groups: tuple[Group, ...]
    failed: dict[int, Exception]  # what was raised for others, by their processors

    def at(self, places: Sequence[int]) -> "Decided":
        """Return it for requests that stand at these places among others."""
        groups = []
        for members, verified in self.groups:
            groups.append(Group(tuple([places[i] for i in members]), verified))
        failed = {places[index]: error for index, error in self.failed.items()}
        return Decided(tuple(groups), failed)

    @property
    def arrays(self) -> list[mx.array]:
        """All there is to evaluate."""
        result: list[mx.array] = []
        for _, verified in self.groups:
            result += verified.arrays
        return result

    def first_tokens(self) -> mx.array:
        """Return the first chosen token of each request, uint32 [requests].

        Those that failed get token 0.
        """
        tokens, order = [], [*self.failed]
        if self.failed:
            tokens.append(mx.zeros((len(order),), mx.uint32))
        for members, verified in self.groups:
            order += members
            tokens.append(verified.tokens[:: len(verified.tokens) // len(members)])
        return in_order(tokens, order)


def in_order(tokens: list[mx.array], order: list[int]) -> mx.array:
    """Put tokens together that stand at these places."""
    joined = mx.concatenate(tokens) if len(tokens) > 1 else tokens[0]
    if order == list(range(len(order))):
        return joined
    return joined[mx.array(sorted(range(len(order)), key=order.__getitem__))]


def count_accepted(
    drafted: mx.array, choices: mx.array, counts: mx.array | None = None
) -> mx.array:
    """Count the drafted tokens that equal the target's own choices.

    Both chose with the same noise (keyed choice), or without any (greedy). What is
    emitted is always `choices[: accepted + 1]`, so the draft cannot change the text.

    Args:
        drafted: uint32 [..., k].
        choices: uint32 [..., k + 1], the target's choice after each row.
        counts: integers [...], how many were drafted, where some are padding.

    Returns:
        int32 [...], from 0 to k.
    """
    agree = drafted == choices[..., :-1]
    if counts is not None:
        agree = agree & (mx.arange(agree.shape[-1]) < counts[..., None])
    agree = agree.astype(mx.int32)
    return mx.cumprod(agree, axis=-1).sum(axis=-1).astype(mx.int32)


def normalizers(logits: mx.array) -> mx.array:
    """Return what turns logits into log-probabilities, when subtracted.

    It also shows whether a token can be chosen: it is not finite where a row holds
    a NaN or plus infinity, or nothing but minus infinity. The largest value alone
    would not: it is known to carry a NaN along on some devices only. [rows, vocab] to
    [rows], of the logits' dtype.
    """
    return mx.logsumexp(logits, axis=-1)


def peaks(logits: mx.array) -> mx.array:
    """Return the largest logits: finite in the rows in which `normalizers` are.

    They also show whether a token can be chosen, for a fifth of the time on a CPU,
    where each exponential counts. [rows, vocab] to [rows]; NaN where a row holds one.
    """
    largest = logits.max(axis=-1)
    if mx.default_device() == mx.cpu or mx.cuda.is_available():
        return largest  # which carries a NaN along: the tests try it
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
    """Return the log-probabilities of chosen tokens, and of the most probable.

    Of equally probable ones the chosen token comes first, or alone where there is no
    room for all of them.
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
    # Between the places of others, so that no two are the same.
    first = 2 * (values > chosen).sum(axis=-1, keepdims=True) - 1
    order = mx.argsort(mx.where(ids == tokens, first, 2 * places), axis=-1)
    return mx.take_along_axis(ids, order, axis=-1)

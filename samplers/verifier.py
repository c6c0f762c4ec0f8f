"""One request's decisions: the drafted tokens, and how many the target accepts.

Three acceptance rules, all lossless:

    keyed       a drafted token is accepted if it is the target's own choice, made with
                the same noise: a seed gives the same text with every draft
    rejection   a drafted token is accepted with probability min(1, p / q): more tokens
                are accepted, but each draft and draft length gives another text
    block       as rejection, but each coin decides on a prefix of the draft

Greedy requests choose without noise under every rule. This module evaluates no array
and reads none.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import mlx.core as mx

from mlx_speculation.samplers.acceptance import (
    Choice,
    Verified,
    count_accepted,
    normalizers,
    peaks,
    reported,
)
from mlx_speculation.samplers.chooser import Chooser
from mlx_speculation.samplers.noise.gumbel import gumbel_of, stream_key
from mlx_speculation.samplers.noise.round_keys import (
    COIN,
    DRAFT,
    RESIDUAL,
    coins,
    round_keys,
)
from mlx_speculation.samplers.row_context import Rows
from mlx_speculation.samplers.rules.probs import Rule, draw
from mlx_speculation.samplers.rules.verification import BLOCK, REJECTION
from mlx_speculation.samplers.sampling import Sampling
from mlx_speculation.samplers.user_sampler import within

Acceptance = Literal["keyed", "rejection", "block"]

RULES: dict[str, Rule | None] = {
    "keyed": None,
    "rejection": REJECTION,
    "block": BLOCK,
}


class Verifier:
    """Decides for one request; has no state that a round could change."""

    def __init__(
        self,
        chooser: Chooser,  # chooses by the request's options, with its noise
        acceptance: Acceptance = "keyed",
        *,
        # Include the log-probabilities of all ids in reports
        whole_rows: bool = False,
        rows: int | None = None,  # of a decision, padding included; None: any number
    ) -> None:
        self.chooser = chooser if rows is None else chooser.in_fixed_shape(rows)
        self.draft_chooser = chooser.for_drafts()
        self._rule = None if chooser.sampling.greedy else RULES[acceptance]
        self.whole_rows = whole_rows
        # Requests with equal `shared` are decided in one call. None: this request is
        # decided alone, since its rule or sampler draws, or processors read its tokens
        self.shared = self._in_common()
        self._streams: dict[int, mx.array] = {}

    @property
    def tolerates_invalid_logits(self) -> bool:
        """Return whether drafting from invalid logits, such as NaN, does no harm.

        The drafted token is a valid id in any case. But a rule other than keyed choice
        would get NaN in `draft_probs`, and processors would see the invalid logits.
        """
        return self._rule is None and not self.chooser.processors.active

    def _in_common(self) -> tuple[Sampling, bool] | None:
        sampling, processors = self.chooser.sampling, self.chooser.processors
        if self._rule is not None or sampling.sampler is not None or processors.active:
            return None
        plain = replace(sampling, seed=None)
        if sampling.greedy:
            plain = Sampling(draft_temperature=sampling.draft_temperature)
        return plain, self.whole_rows

    def probs(
        self, logits: mx.array, rows: Rows, *, for_draft: bool = False
    ) -> mx.array:
        """Return the probability of each token id, float32 [rows, width].

        It is the same under every rule; with `for_draft` it has the draft temperature.
        `logits` are [rows, vocab]. The chooser's `processors.parallel` has to be true.
        """
        chooser = self.draft_chooser if for_draft else self.chooser
        processed = chooser.processed(logits, rows, for_draft=for_draft)
        return self._probs(chooser, processed, rows)

    def propose(
        self, logits: mx.array, rows: Rows, ids: mx.array | None = None
    ) -> Choice:
        """Choose the next token of a draft, one for each row.

        `logits` are the drafter's [rows, vocab], or [rows, n] with `ids`, the distinct
        token ids of the columns, uint32 [n]. Ids that the target lacks are left out.
        `rows.ahead` has the tokens of the draft before it.
        """
        chooser = self.draft_chooser
        if ids is not None:
            logits = spread(logits, ids, chooser.width)
        processed = chooser.processed(logits, rows, for_draft=True)
        if self._rule is None or chooser.sampling.greedy:
            return Choice(chooser.pick(processed, rows))
        probs = self._probs(chooser, processed, rows)
        start, places = mx.array([rows.round_start]), mx.array(list(rows.positions))
        keys = round_keys(self._stream(DRAFT), start, places)
        return Choice(draw(probs, gumbel_of(keys, probs.shape[-1])), probs)

    def verify(
        self,
        logits: mx.array,  # [k + 1, vocab] of the target
        rows: Rows,  # the tokens before each row; the drafted tokens are `ahead`
        drafted: mx.array | None = None,  # uint32 [k], or None for k = 0
        # float32 [k, ids], what the drafted tokens were drawn from; None: no draws
        draft_probs: mx.array | None = None,
        *,
        # Report log-probabilities, with this many of the most probable ids
        top: int | None = None,
    ) -> Verified:
        """Decide which of k drafted tokens are accepted, and choose the next token."""
        processed = self.chooser.processed(logits, rows)
        return self._decide(processed, rows, drafted, draft_probs, None, top)

    def sequential(
        self,
        logits: mx.array,
        rows: Rows,
        drafted: mx.array | None = None,
        draft_probs: mx.array | None = None,
        *,
        top: int | None = None,
    ) -> Iterator[Verified]:
        """Decide row after row, for serial processors; yield one chosen token a row.

        The caller reads each decision before it takes the next, and stops at a rejected
        token or an end of the text. The arguments are those of `verify`. Block
        verification is not possible, since it needs all rows.
        """
        k = 0 if drafted is None else len(drafted)
        start = rows.positions[0]
        for index, row in enumerate(self.chooser.processors.serial(logits, rows)):
            processed = self.chooser.usable(row, rows.some(index))
            if drafted is None or index == k:
                yield self._decide(processed, rows.some(index), None, None, start, top)
                continue
            # A rule needs a row after the drafted token too; any row will do, since
            # `first` drops the decision on it.
            twice = mx.concatenate([processed, processed])
            one = slice(index, index + 1)
            probs = None if draft_probs is None else draft_probs[one]
            pair = rows.some(index, 2)
            yield self._decide(twice, pair, drafted[one], probs, start, top).first

    def _decide(
        self,
        processed: mx.array,
        rows: Rows,
        drafted: mx.array | None,
        draft_probs: mx.array | None,
        start: int | None,  # the round's first position; None: that of the first row
        top: int | None,
    ) -> Verified:
        """Decide on k drafted tokens, given k + 1 rows."""
        if self._rule is None:
            tokens = self.chooser.pick(processed, rows)
            accepted = None if drafted is None else count_accepted(drafted, tokens)
        else:
            tokens, accepted = self._judge(processed, rows, drafted, draft_probs, start)
        if top is None:
            normals = peaks(processed)
        else:
            filled = self.chooser.filled_up(processed)
            normals = normalizers(filled)[: len(processed)]
        if self.chooser.sampling.sampler is not None:
            tokens, normals = within(tokens, normals, processed.shape[-1])
        report = None
        if top is not None:
            report = reported(processed, normals, tokens, top, whole=self.whole_rows)
        return Verified(tokens, accepted, normals, report)

    def _judge(
        self,
        processed: mx.array,
        rows: Rows,
        drafted: mx.array | None,
        draft_probs: mx.array | None,
        start: int | None,
    ) -> tuple[mx.array, mx.array | None]:
        """Accept by the rule, and draw the correction or bonus."""
        probs = self._probs(self.chooser, processed, rows)
        first = mx.array([rows.positions[0] if start is None else start])
        if drafted is None:
            return self._draw(probs, first, mx.array(list(rows.positions))), None
        assert self._rule is not None
        positions = mx.array(list(rows.positions))
        thrown = coins(round_keys(self._stream(COIN), first, positions[:-1]))
        outcome = self._rule.verify(probs, draft_probs, drafted, thrown)
        place = positions[:1] + outcome.accepted
        last = self._draw(outcome.next_probs[None], first, place)
        drafted = mx.concatenate([drafted, last.astype(drafted.dtype)])
        stays = mx.arange(len(positions)) < outcome.accepted
        return mx.where(stays, drafted, last), outcome.accepted

    def _draw(self, probs: mx.array, starts: mx.array, places: mx.array) -> mx.array:
        keys = round_keys(self._stream(RESIDUAL), starts, places)
        return draw(probs, gumbel_of(keys, probs.shape[-1]))

    def _probs(self, chooser: Chooser, processed: mx.array, rows: Rows) -> mx.array:
        """Return probabilities over all token ids, float32 [rows, width]."""
        probs = mx.softmax(chooser.log_probs(processed, rows), axis=-1)
        missing = chooser.width - probs.shape[-1]
        return mx.pad(probs, [(0, 0), (0, missing)]) if missing else probs

    def _stream(self, purpose: int) -> mx.array:
        if purpose not in self._streams:
            seed = self.chooser.sampling.seed
            assert seed is not None
            self._streams[purpose] = stream_key(seed, purpose)
        return self._streams[purpose]


def spread(logits: mx.array, ids: mx.array, width: int) -> mx.array:
    """Return logits [rows, width]: those given at `ids`, -inf elsewhere.

    `logits` are [rows, n], and `ids` [n] or [rows, n].
    """
    everywhere = mx.full((len(logits), width + 1), -mx.inf, logits.dtype)
    # Ids >= `width` go to a column that is cut off.
    places = mx.minimum(ids, width)
    if ids.ndim == 2:
        everywhere = mx.put_along_axis(everywhere, places, logits, axis=1)
    else:
        everywhere[:, places] = logits
    return everywhere[:, :width]

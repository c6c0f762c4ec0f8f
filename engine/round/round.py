"""The rounds of one generation, on token ids.

A round with k drafts: the drafter proposes, the target runs once over what it has
not seen and the drafts, the chooser turns its last k + 1 rows into the target's own
choices, one evaluation brings them back, a prefix is committed. A round with k = 0 is
an ordinary decoding step and is pipelined as in mlx-lm: the next step is submitted
before the last token is read. So it is after an empty draft, and where a draft is
found while a step is on its way, the forward over the draft is submitted behind it:

    tokens t_0..t_n, the lane has seen t_0..t_{n-1}, k = 3
    fed       t_n  d_1  d_2  d_3
    choices   c_1  c_2  c_3  c_4        accepted = 2 when c_1 = d_1, c_2 = d_2
    emitted   c_1  c_2  c_3             the lane keeps t_n d_1 d_2

    behind a step, which was fed t_n and chooses c_1; d_1 is left out
    fed       c_1  d_2  d_3
    choices   c_2  c_3  c_4             accepted = 1 when c_2 = d_2
    emitted   c_1  c_2  c_3             the lane keeps c_1 d_2

It knows nothing about text: a `Cut` says where the emitted tokens end.
"""

from dataclasses import dataclass

import mlx.core as mx

from mlx_speculation.engine.draft_length.base import DraftLengthPolicy
from mlx_speculation.engine.draft_length.early_stop import Stop
from mlx_speculation.engine.drafters.base import NOTHING, Choices, Draft, Drafter
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.engine.round.outcome import (
    Emitted,
    MakeCut,
    Submitted,
    Verdict,
    read,
)
from mlx_speculation.engine.round.sequential import decide_in_turn
from mlx_speculation.engine.round.verify import Forwards
from mlx_speculation.engine.stats import Statistics
from mlx_speculation.errors import NonFiniteLogitsError
from mlx_speculation.models import Lane, LaneRound
from mlx_speculation.samplers import Verifier
from mlx_speculation.samplers.constraints.masks import Masks


@dataclass(frozen=True, slots=True)
class Parts:
    """What a `Decoder` was made of; see there."""

    target: Lane
    sequence: Sequence
    verifier: Verifier
    drafter: Drafter | None
    lengths: DraftLengthPolicy
    top: int | None
    masks: Masks | None
    statistics: Statistics


class Rounds:
    """Runs rounds of a given length, and keeps what one leaves for the next.

    Args:
        parts: what runs them.
        forwards: submits the target's forwards.

    Attributes:
        in_turn: whether rows are decided one after the other, see
        `engine.round.sequential`.
        in_flight: a step that was submitted, and is not read yet.
        next_token: what comes after the known tokens, where a round has brought it.
        last_round: the last one that was not plain, to be taken back.
        certainties: of the last round's draft, see `Outcome`.
    """

    def __init__(self, parts: Parts, forwards: Forwards) -> None:
        self._target = parts.target
        self._sequence = parts.sequence
        self._verifier = parts.verifier
        self._drafter = parts.drafter
        self._masks = parts.masks
        self._statistics = parts.statistics
        self._processors = parts.verifier.chooser.processors
        self._forwards = forwards
        self.in_turn = not self._processors.parallel
        self.in_flight: Submitted | None = None
        self.next_token: int | None = None
        self.last_round: LaneRound | None = None
        self.certainties: tuple[float, ...] = ()

    def run(
        self,
        length: int,
        cut: MakeCut,
        *,
        drafts_next: bool,
        stop: Stop | None = None,
    ) -> str | None:
        """Run a round with at most `length` drafted tokens, and commit it.

        Args:
            length: how many tokens to draft; none where it is 0 or less.
            cut: gets the emitted tokens before anything is committed.
            drafts_next: whether the round after a plain one is to draft: nothing is
                submitted ahead then.
            stop: where a drafter that is unsure ends its draft; None: nowhere.

        Returns:
            Why the generation ends with this round, or None.
        """
        drafter, step = self._drafter, self.in_flight
        self.certainties = ()
        ahead = 0 if step is None else 1
        if drafter is None or length <= 0:
            if not self.in_turn:
                return self._plain_round(cut, submit_next=not drafts_next)
            return self._round_without_draft(cut)
        known, seen = len(self._sequence.tokens), self._target.seen
        try:
            draft = self._propose(drafter, ahead + length, stop)
            if draft.length > ahead:
                if self.in_turn:
                    return self._round_in_turn(draft, cut, drafter)
                return self._drafted_round(drafter, draft, cut)
            drafter.discard()
            self._statistics.reads += draft.reads
        except BaseException as error:
            drafter.discard()
            if self._target.seen == seen:  # else the round had been committed
                del self._sequence.tokens[known:]
                self.in_flight = step
                if step is not None and isinstance(error, NonFiniteLogitsError):
                    step.lane_round.rollback()
                    self.in_flight = None
            raise
        reason = self._round_without_draft(cut)
        self._statistics.empty_drafts += draft is not NOTHING
        return reason

    def _round_without_draft(self, make_cut: MakeCut) -> str | None:
        if not self.in_turn:
            return self._plain_round(make_cut)
        return self._round_in_turn(Draft(mx.zeros((0,), mx.uint32)), make_cut)

    def _plain_round(
        self, make_cut: MakeCut, *, submit_next: bool = True
    ) -> str | None:
        """Run a step and, unless a draft is to follow, submit the next one."""
        step = self.in_flight
        fresh: Submitted | None = None
        following: Submitted | None = None
        try:
            if step is None:
                unseen = mx.array(self._sequence.tokens[self._target.seen :])
                step = fresh = self._forwards.submit_step(unseen)
            if submit_next:
                chosen = step.verified.tokens
                following = self._forwards.submit_step(chosen, behind=step)
            verdict = read(step, self._forwards.clock)
            cut = make_cut(self._emitted(verdict))
        except BaseException as error:
            if following is not None:
                following.lane_round.rollback()
            if fresh is not None:
                fresh.lane_round.rollback()
            elif isinstance(error, NonFiniteLogitsError) and step is not None:
                step.lane_round.rollback()
                self.in_flight = None
            raise
        self._sequence.tokens += verdict.tokens
        self.in_flight = following
        if self._masks is not None:
            self._follow(verdict.tokens)
        self._statistics.count_step()
        return cut.reason

    def _propose(self, drafter: Drafter, limit: int, stop: Stop | None) -> Draft:
        self._forwards.clock.note("host")
        choices = Choices(self._verifier, self._masks, stop)
        draft = drafter.propose(self._sequence, limit, choices)
        if draft.doubts is None:
            draft = choices.checked(draft, limit)
        if draft.length:
            mx.async_eval(*draft.arrays)  # runs while the target's graph is built
        self._forwards.clock.note("draft")
        return draft

    def _drafted_round(
        self, drafter: Drafter, draft: Draft, make_cut: MakeCut
    ) -> str | None:
        step, behind = self.in_flight, draft
        if step is None:
            fed = mx.array(self._sequence.tokens[self._target.seen :], mx.uint32)
        else:  # its token is not known yet, and stands in the draft's first place
            fed, behind = step.verified.tokens, draft.behind(1)
        states = self._processors.fork()
        with self._target.begin() as lane_round:
            submitted = self._forwards.submit_verify(lane_round, fed, behind, step)
            before = [] if step is None else [read(step)]  # was waited for
            first = [token for verdict in before for token in verdict.emitted]
            verdict = read(submitted, self._forwards.clock)
            cut = make_cut(self._emitted(*before, verdict))
            emitted = (first + verdict.emitted)[: cut.keep]
            accepted = min(verdict.accepted, cut.keep - len(first))
            lane_round.prepare(len(fed) + accepted)
            right = not first or first == draft.tokens[:1].tolist()  # no more waiting
            drafter.settle(len(first) + accepted if right else 0)
            # Before the commit, so that what the caches hold always has its name.
            self._sequence.tokens += emitted
            self.in_flight = None
            lane_round.commit(len(fed) + accepted)
            self.last_round = lane_round
        if step is None:
            # All of them are computed by now.
            self.certainties = tuple(map(float, draft.certainties))
        self._follow(emitted)
        if cut.keep > len(first):
            self._processors.keep(cut.keep - len(first))
        else:
            self._processors.restore(states)
        all_held = len(first) + accepted == cut.keep
        self.next_token = verdict.tokens[accepted] if all_held else None
        self._count(draft, len(first), verdict.accepted, cut.keep)
        return cut.reason

    def _round_in_turn(
        self, draft: Draft, make_cut: MakeCut, drafter: Drafter | None = None
    ) -> str | None:
        """Run a round, drafted or not, whose rows are decided one after the other.

        Nothing is submitted ahead; see `engine.round.sequential`.
        """
        fed = mx.array(self._sequence.tokens[self._target.seen :], mx.uint32)
        with self._target.begin(whole=draft.length == 0) as lane_round:
            turns = self._forwards.verify_in_turn(lane_round, fed, draft)
            text = None if self._masks is None else self._masks.text
            verdicts, reason = decide_in_turn(turns, make_cut, text, draft.length)
            self._forwards.clock.note("sampler")
            emitted = [token for verdict in verdicts for token in verdict.emitted]
            accepted = sum(verdict.accepted for verdict in verdicts)
            lane_round.prepare(len(fed) + accepted)
            if drafter is not None:
                drafter.settle(accepted)
            self._sequence.tokens += emitted
            lane_round.commit(len(fed) + accepted)
            self.last_round = lane_round
        self._follow(emitted)
        self._processors.keep(len(emitted))
        self.next_token = None
        self._count(draft, 0, accepted, len(emitted))
        self._statistics.reads += len(emitted) - 1 + (draft.length > 0)
        return reason

    def _emitted(self, *verdicts: Verdict) -> Emitted:
        """Return what these verdicts emit, as far as the constraint goes along."""
        emitted = Emitted.of(*verdicts)
        return emitted if self._masks is None else emitted.under(self._masks.text)

    def _follow(self, committed: list[int]) -> None:
        """Let the constraint know what was committed."""
        if self._masks is not None:
            self._masks.text.commit(committed)
            self._statistics.reads += self._masks.take_reads()

    def _count(self, draft: Draft, first: int, accepted: int, emitted: int) -> None:
        """Count a step's token that came first, if any, and the round behind it."""
        statistics = self._statistics
        if first:
            statistics.count(drafted=0, accepted=0, emitted=1)
        if emitted > first:
            statistics.count(
                drafted=draft.length - first,
                accepted=accepted,
                emitted=emitted - first,
                source=draft.source,
            )
        statistics.reads += draft.reads
        statistics.reruns = self._target.reruns
        statistics.mixer_reruns = self._target.mixer_reruns

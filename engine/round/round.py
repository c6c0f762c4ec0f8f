"""One round of one request, on token ids.

A round with k = 0 is an ordinary decoding step and is pipelined as in mlx-lm: the next
step is submitted before the last token is read. So it is after an empty draft, and
where a draft is found while a step is in flight, the forward over the draft is
submitted behind it:

    tokens t_0..t_n, the lane has seen t_0..t_{n-1}, k = 3
    fed       t_n  d_1  d_2  d_3
    choices   c_1  c_2  c_3  c_4        accepted = 2 when c_1 = d_1, c_2 = d_2
    emitted   c_1  c_2  c_3             the lane keeps t_n d_1 d_2

    behind a step, which was fed t_n and chooses c_1; d_1 is left out
    fed       c_1  d_2  d_3
    choices   c_2  c_3  c_4             accepted = 1 when c_2 = d_2
    emitted   c_1  c_2  c_3             the lane keeps c_1 d_2
"""

from typing import Any, NamedTuple

from mlx_speculation.engine.drafters.base import NOTHING, OpenDrafter, Proposal
from mlx_speculation.engine.drafters.fault_guard import CheckedChoose
from mlx_speculation.engine.round.outcome import Cut, Pending, RoundOutcome, outcome_of
from mlx_speculation.engine.round.request import Request
from mlx_speculation.engine.round.sequential import run_in_turn
from mlx_speculation.engine.round.tree_round import submit_tree
from mlx_speculation.engine.round.verify import submit_step, submit_verify
from mlx_speculation.errors import NonFiniteLogitsError
from mlx_speculation.models import LaneRound


class Before(NamedTuple):
    """What a round that fails goes back to."""

    known: int
    seen: int
    in_flight: Pending | None
    processors: Any


class Rounds:
    """Runs rounds of a given length, and keeps what one leaves for the next.

    Attributes:
        request: what they are run with.
        in_turn: whether rows are decided one after the other, see
            `engine.round.sequential`.
        in_flight: a step that was submitted, and is not read yet.
        next_token: what comes after the known tokens, where a round has brought it.
        last_round: the last one that was not plain, to be taken back.
    """

    def __init__(self, request: Request) -> None:
        processors = request.verifier.chooser.processors
        self.request = request
        self._text = request.text
        # Asked once: most requests have no processors with a state.
        self._processors = processors if processors.has_state else None
        # Whose proposal is pending: neither settled nor discarded
        self._asked: OpenDrafter | None = None
        self.in_turn = not processors.parallel
        self.in_flight: Pending | None = None
        self.next_token: int | None = None
        self.last_round: LaneRound | None = None

    def begin(self) -> Before:
        """Begin a round: return what `undo` goes back to."""
        self.last_round = None  # or the state before it would stay
        request, processors = self.request, self._processors
        known, seen = len(request.sequence.tokens), request.target.seen
        states = None if processors is None else processors.fork()
        return Before(known, seen, self.in_flight, states)

    def undo(self, before: Before, error: BaseException) -> None:
        """Go back to the state before a round that has failed."""
        request = self.request
        if self._processors is not None:
            self._processors.restore(before.processors)
        drafter, self._asked = self._asked, None
        if drafter is not None:
            drafter.discard()
        if request.target.seen != before.seen:  # the round had been committed
            return
        del request.sequence.tokens[before.known :]
        self.in_flight = before.in_flight
        if self.in_flight is not None and isinstance(error, NonFiniteLogitsError):
            self.in_flight.lane_round.rollback()
            self.in_flight = None

    def plain(self, cut: Cut, *, submit_next: bool = True) -> RoundOutcome:
        """Run a step and, with `submit_next`, submit the next one; see `drafted`."""
        if self.in_turn:
            return self._in_turn(NOTHING, cut)
        request = self.request
        step, own = self.in_flight, []  # what this round has submitted
        try:
            if step is None:
                step = submit_step(request)
                own.append(step)
            following = None
            if submit_next:
                following = submit_step(request, behind=step)
                own.append(following)
            step.wait(request.clock)
            found = outcome_of(step.verified)
            outcome = cut(found if self._text is None else found.under(self._text))
        except BaseException:
            for pending in reversed(own):
                pending.lane_round.rollback()
            raise
        request.sequence.tokens += outcome.tokens
        self.in_flight = following
        self._count(outcome, None, 0)
        return outcome

    def drafted(self, length: int, cut: Cut) -> RoundOutcome:
        """Run a round with a draft; a plain one where the drafter proposes nothing.

        Args:
            length: how many tokens to draft at most, from 1.
            cut: gets the emitted tokens before anything is committed.
        """
        # 2. The drafter proposes up to k tokens, checked and submitted by its guard and
        #    not read. Behind a step in flight the first one stands for its token.
        request, ahead = self.request, 0 if self.in_flight is None else 1
        drafter = self._asked = request.drafter
        assert drafter is not None
        request.clock.note("host")
        tree = 0 if ahead else request.tree
        choices = CheckedChoose(request.verifier, request.masks, tree)
        draft = drafter.propose(request.sequence, ahead + length, choices)
        request.clock.note("draft")
        if draft.length > ahead and self.in_turn:
            return self._in_turn(draft, cut)
        if draft.length > ahead:
            return self._verify(draft, cut)
        drafter.discard()
        self._asked = None
        request.statistics.reads += draft.reads
        outcome = self.plain(cut)
        request.statistics.empty_drafts += draft is not NOTHING
        return outcome

    def forced(self, draft: Proposal, cut: Cut) -> RoundOutcome:
        """Run a round with what a constraint leaves no choice of; see `forced`."""
        return (self._in_turn if self.in_turn else self._verify)(draft, cut)

    def _verify(self, draft: Proposal, cut: Cut) -> RoundOutcome:
        """Let the target verify a draft, and commit what is accepted."""
        request, step = self.request, self.in_flight
        # 3. A journal of each of the target's caches lets a prefix of it stay.
        with request.target.begin() as lane_round:
            submit = submit_verify if draft.branches is None else submit_tree
            pending = submit(request, lane_round, draft, step)  # 4. and 5.
            # 6. One evaluation brings back the tokens and the count.
            pending.wait(request.clock)
            found = outcome_of(pending.verified)
            if step is not None:
                found = found.behind(outcome_of(step.verified))
            # 7. Cut at stop tokens and budget; settle the drafter; commit the target.
            outcome = cut(found if self._text is None else found.under(self._text))
            keep = len(outcome.tokens)
            accepted = min(found.accepted, keep - found.first)
            held = pending.fed + accepted
            lane_round.prepare(held)
            if self._asked is not None:
                self._asked.settle(found.settled(draft, accepted))
            # Before the commit, so that what the caches hold always has its name.
            request.sequence.tokens += outcome.tokens
            self.in_flight = None
            lane_round.commit(held)
            self.last_round = lane_round
        # 8. Nothing above has failed: constraint, processors and counts follow.
        self._asked = None
        all_held = found.first + accepted == keep
        self.next_token = found.tokens[keep] if all_held else None
        self._count(outcome, draft, keep - found.first)
        return outcome

    def _in_turn(self, draft: Proposal, cut: Cut) -> RoundOutcome:
        """Run a round, drafted or not, whose rows are decided one after the other."""
        outcome, self.last_round = run_in_turn(self.request, draft, cut, self._asked)
        self._asked = self.next_token = None
        self._count(outcome, draft, len(outcome.tokens))
        return outcome

    def _count(self, outcome: RoundOutcome, draft: Proposal | None, rows: int) -> None:
        """Let constraint, processors (by the last forward's rows) and counts follow."""
        request = self.request
        counts, target = request.statistics, request.target
        if request.masks is not None:
            request.masks.text.commit(outcome.tokens)
            counts.reads += request.masks.take_reads()
        if self._processors is not None and rows:
            self._processors.keep(rows)
        outcome.count(counts, draft)
        counts.reruns, counts.mixer_reruns = target.reruns, target.mixer_reruns

"""One round of the requests of a lane, on token ids.

A round with k = 0 or an empty draft is an ordinary decoding step. Steps are pipelined
as in mlx-lm: the next step is submitted before the last token is read. Rounds with a
draft, without and with a step in flight:

    tokens t_0..t_n, the lane has seen t_0..t_{n-1}, k = 3
    fed       t_n  d_1  d_2  d_3
    choices   c_1  c_2  c_3  c_4        accepted = 2: c_1 = d_1, c_2 = d_2, c_3 != d_3
    emitted   c_1  c_2  c_3             the lane keeps t_n d_1 d_2

    a step in flight was fed t_n and chose c_1; d_1, the guess of c_1, is left out
    fed       c_1  d_2  d_3
    choices   c_2  c_3  c_4             accepted = 1: c_2 = d_2, c_3 != d_3
    emitted   c_1  c_2  c_3             the lane keeps c_1 d_2

A request that fails keeps no token of the round. An error that concerns all requests
undoes the round, which can then run again.

The numbers in comments are those of the steps in docs/how_a_round_works.md.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from mlx_speculation.engine.drafters.base import NOTHING, OpenDrafter, Proposal
from mlx_speculation.engine.drafters.fault_guard import CheckedChoose
from mlx_speculation.engine.round.outcome import Cut, Pending, Read, RoundOutcome
from mlx_speculation.engine.round.request import Running
from mlx_speculation.engine.round.sequential import Turn, decide_sequentially, turn_of
from mlx_speculation.engine.round.tree_round import submit_tree
from mlx_speculation.engine.round.verify import submit_step, submit_verify
from mlx_speculation.engine.shared_drafters.shared import SharedDrafter
from mlx_speculation.errors import NonFiniteLogitsError
from mlx_speculation.models import RequestRound


class Before(NamedTuple):
    """State that `Rounds.undo` restores after a failed round."""

    known: list[int]
    in_flight: Pending | None
    processors: list[Any]


class Proposals:
    """Proposals for the requests of a round, until they are settled or discarded.

    `shared` is the drafter for all requests at once; None: there is no such drafter.
    `failed` holds errors raised while drafting, by the place of the request.
    """

    def __init__(self, running: Running) -> None:
        self._running = running
        self.shared: SharedDrafter | None = None
        self.failed: dict[int, Exception] = {}
        self._pending: dict[int, OpenDrafter] = {}  # neither settled nor discarded
        self._together: list[Proposal] = []  # of the shared drafter

    def propose(
        self, ahead: int, limits: Sequence[int], shared: Sequence[int] = ()
    ) -> list[Proposal]:
        """Return a draft for each request, which may be NOTHING.

        Each request's own drafter may propose `limits[place]` tokens, the shared
        drafter `shared[place]`; `shared` may be empty. If a step is in flight (`ahead`
        is 1, else 0), each draft begins with a guess of the step's token.
        """
        # 2. The drafter proposes up to k tokens; its guard checks and submits them,
        #    without a read.
        running, requests = self._running, self._running.requests
        running.clock.note("host")
        result = [NOTHING] * len(requests)
        if self.shared is not None and shared:
            result, self.failed = self.shared.propose(requests, shared)
            self._together = [*result]
        for place, request in enumerate(requests):
            limit, drafter = limits[place], request.drafter
            if limit <= 0 or drafter is None:
                continue
            masks, tree = request.masks, 0 if ahead else request.tree
            if not running.alone:
                # In a batch, `verify` masks all drafts after one read; all are chains.
                masks, tree = None, 0
            choices = CheckedChoose(request.verifier, masks, tree)
            self._pending[place] = drafter
            try:
                draft = drafter.propose(request.sequence, ahead + limit, choices)
            except Exception as error:
                self.failed[place] = running.failure(error)
                self._pending.pop(place).discard()
                continue
            if len(draft.tokens) > ahead:
                result[place] = draft
                continue
            self._pending.pop(place).discard()
            request.statistics.reads += draft.reads
            request.statistics.empty_drafts += draft is not NOTHING
        running.clock.note("draft")
        if result.count(NOTHING) == len(result):
            self.discard()
        return result

    def settle(
        self, drafts: Sequence[Proposal], result: Sequence[Read], kept: list[int]
    ) -> None:
        """Let each drafter keep `kept[place]` tokens of its draft; below 0: undo it."""
        settled = [*kept]
        for place, one in enumerate(result):
            if isinstance(one, RoundOutcome) and one.first:
                # The draft's first token is a guess of the step's token.
                right = one.tokens[:1] == drafts[place].tokens[:1].tolist()
                settled[place] = 1 + kept[place] if right else 0
        for place, drafter in self._pending.items():
            if settled[place] < 0:
                drafter.discard()
            else:
                drafter.settle(settled[place])
        if self.shared is not None:
            for place, draft in enumerate(self._together):
                if draft is not drafts[place]:  # another draft was verified
                    settled[place] = -1
            self.shared.settle(settled)

    def done(self) -> None:
        """Forget how to undo the proposals."""
        self._pending, self._together = {}, []
        if self.shared is not None:
            self.shared.done()

    def discard(self) -> None:
        """Let drafters undo their proposals."""
        pending, self._pending, self._together = self._pending, {}, []
        for drafter in pending.values():
            drafter.discard()
        if self.shared is not None:
            self.shared.discard()


class Rounds:
    """Runs rounds, and keeps the state between them.

    Attributes:
        in_flight: a plain step that was submitted and is not read yet; or None.
        last: if a single request's last round called `verify`: the transaction, the
            outcome before and after the cut, and how many accepted tokens were kept.
    """

    def __init__(self, running: Running) -> None:
        self.running = running
        self.proposals = Proposals(running)
        self._committed = False
        self.in_flight: Pending | None = None
        self.last: tuple[RequestRound, Read, Read, int] | None = None

    def begin(self) -> Before:
        """Begin a round; return the state that `undo` restores."""
        self.last = None  # frees what could roll back the last round
        self._committed, self.running.interrupt = False, None
        self.proposals.failed = {}
        known, states = [], []
        for request in self.running.requests:
            known.append(len(request.sequence.tokens))
        for processors in self.running.stateful.values():
            states.append(processors.fork())
        return Before(known, self.in_flight, states)

    def undo(self, before: Before, error: BaseException) -> None:
        """Restore the state before a round that has failed."""
        running = self.running
        stateful = running.stateful.values()
        for processors, state in zip(stateful, before.processors, strict=True):
            processors.restore(state)
        self.proposals.discard()
        if self._committed:
            return
        for request, known in zip(running.requests, before.known, strict=True):
            del request.sequence.tokens[known:]
        self.in_flight = before.in_flight
        if self.in_flight is not None and isinstance(error, NonFiniteLogitsError):
            self.in_flight.lane_round.rollback()
            self.in_flight = None

    def plain(self, cuts: Sequence[Cut], *, submit_next: bool) -> list[Read]:
        """Run a step; with `submit_next`, submit the next. See `verify` for `cuts`."""
        running = self.running
        if running.sequential:
            return self.verify([NOTHING] * len(running.requests), cuts)
        step, submitted = self.in_flight, []  # steps that this round has submitted
        try:
            if step is None:
                step = submit_step(running)
                submitted.append(step)
            next_step = None
            if submit_next:
                next_step = submit_step(running, step)
                submitted.append(next_step)
            step.wait(running.clock)
            result = self._cut(step.read(), cuts)
        except BaseException:
            for pending in reversed(submitted):
                pending.lane_round.rollback()
            raise
        for request, one in zip(running.requests, result, strict=True):
            if isinstance(one, RoundOutcome):
                request.sequence.tokens += one.tokens
        self.in_flight, self._committed = next_step, True
        self._count(result, None)
        return result

    def verify(self, drafts: Sequence[Proposal], cuts: Sequence[Cut]) -> list[Read]:
        """Let the target verify drafts, and commit the accepted tokens.

        `drafts` and `cuts` have one entry for each request. A cut shortens the outcome
        before the commit.
        """
        running, step = self.running, self.in_flight
        ours, width = drafts, 0
        if step is not None:
            ours = [draft.without_first(1) for draft in drafts]
        for draft in ours:
            width = max(width, len(draft.tokens))
        # 3. A journal of each of the target's caches can keep a prefix of the new rows.
        with running.lane.begin(
            1 + width, whole=running.alone and not width
        ) as lane_round:
            submit = submit_verify if ours[0].branches is None else submit_tree
            pending = submit(running, lane_round, ours, step)  # 4. and 5.
            # 6. One evaluation brings back the tokens and the counts.
            pending.wait(running.clock)
            read = pending.read(ours)
            if step is not None:
                for place, first in enumerate(step.read()):
                    one = read[place]
                    if isinstance(one, RoundOutcome):
                        read[place] = one.after_step(first)
            # 7. Cut at stop tokens and budget; settle the drafter; commit the target.
            result = self._cut(read, cuts, pending, ours)
            kept: list[int] = []  # accepted tokens of each request; -1: it has failed
            keep: list[int] = []  # new rows of each request that its caches keep
            for one in result:
                count = -1
                if isinstance(one, RoundOutcome):
                    count = min(one.accepted, len(one.tokens) - one.first)
                kept.append(count)
                keep.append(0 if count < 0 else pending.fed + count)
            lane_round.prepare(keep)
            self.proposals.settle(drafts, result, kept)
            # Before the commit, so that every row in the caches has a known token.
            for request, one in zip(running.requests, result, strict=True):
                if isinstance(one, RoundOutcome):
                    request.sequence.tokens += one.tokens
            self.in_flight = None
            lane_round.commit(keep)
            self._committed = True
            if running.alone:
                self.last = lane_round, read[0], result[0], kept[0]
        # 8. The commit has succeeded: update constraints, processors and counts.
        self.proposals.done()
        self._count(result, ours)
        return result

    def _cut(
        self,
        read: list[Read],
        cuts: Sequence[Cut],
        pending: Pending | None = None,
        drafts: Sequence[Proposal] = (),
    ) -> list[Read]:
        """Return each outcome after its cut; decide those of `pending.turns` here."""
        running, result = self.running, [*read]
        turns: dict[int, Turn] = {}
        for place, one in enumerate(read):
            request = running.requests[place]
            try:
                if place in self.proposals.failed:
                    raise self.proposals.failed[place]
                if isinstance(one, Exception):
                    raise one
                text = None if request.masks is None else request.masks.text
                if pending is not None and place in pending.turns:
                    k = len(drafts[place].tokens)
                    turns[place] = turn_of(pending.turns[place], cuts[place], text, k)
                    continue
                result[place] = cuts[place](one if text is None else one.under(text))
            except BaseException as error:
                result[place] = running.failure(error)
        if turns:
            for place, one in decide_sequentially(turns, running).items():
                result[place] = one
            running.clock.note("sampler")
        return result

    def _count(self, result: Sequence[Read], drafts: Sequence[Proposal] | None) -> None:
        """Update each request's constraint, processors and counts after a round."""
        for place, one in enumerate(result):
            if isinstance(one, Exception):
                continue
            request, draft = self.running.requests[place], None
            counts, target = request.statistics, request.target
            if request.masks is not None:
                request.masks.text.commit(one.tokens)
                counts.reads += request.masks.take_reads()
            rows = len(one.tokens) - one.first
            if drafts is not None:
                draft = drafts[place]
                if place in self.running.stateful:
                    self.running.stateful[place].keep(rows)
                counts.reads += draft.reads
            source = "nothing" if draft is None else draft.source
            counts.count(one.drafted, one.accepted, rows, source, one.first)
            counts.reruns, counts.mixer_reruns = target.reruns, target.mixer_reruns

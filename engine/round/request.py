"""One request with all its parts, and the requests that run together on a lane."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from mlx_speculation.engine.draft_length.base import DraftLengthPolicy
from mlx_speculation.engine.drafters.base import OpenDrafter
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.engine.round.warmup import Warmup
from mlx_speculation.engine.stats import Statistics
from mlx_speculation.engine.timing import RoundClock
from mlx_speculation.errors import SpeculationError
from mlx_speculation.models import Lane, RequestLane, cuda_serves
from mlx_speculation.samplers import Constrained, Verifier
from mlx_speculation.samplers.constraints.masks import Masks


def _clock() -> RoundClock:
    return RoundClock(waits=not cuda_serves())


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Request:
    """One request, as a decoder or a batch runs it."""

    target: Lane  # has yet to read `sequence.tokens[target.seen:]`
    sequence: Sequence  # grows with every round
    verifier: Verifier
    drafter: OpenDrafter | None  # `fault_guard` checks its proposals; None: plain steps
    policy: DraftLengthPolicy
    tree: int = 0  # the largest number of nodes of a tree; 0: drafts are chains
    # Decides in place of `verifier` if the target is on several ranks
    decisions: Verifier | None = None
    warmup: Warmup | None = None  # None: shapes of rounds need no rehearsal
    masks: Masks | None = None  # None: there is no constraint
    # Report log-probabilities, and this many of the most probable ids; None: neither
    top: int | None = None
    explain: bool = False  # keep plans and feedback; time each part of a round
    statistics: Statistics = field(default_factory=Statistics)
    clock: RoundClock = field(default_factory=_clock)  # of the round that is running

    @property
    def open_drafter(self) -> OpenDrafter:
        """The drafter; for plain decoding, a drafter that proposes nothing."""
        return self.drafter or OpenDrafter()

    @property
    def drafts(self) -> bool:
        """Return whether the request may get drafts."""
        return self.drafter is not None and self.policy.longest > 0

    def within(self, limit: int) -> int:
        """Return `limit`, cut to the tokens for which the target's caches have room."""
        unseen = len(self.sequence.tokens) - self.target.seen
        return min(limit, self.target.room - max(1, unseen))

    @property
    def text(self) -> Constrained | None:
        """The text under its constraint, if there is one."""
        return None if self.masks is None else self.masks.text

    @property
    def complete(self) -> bool:
        """Return whether the constraint allows nothing but the end of the text."""
        return self.masks is not None and self.masks.text.complete


class Running:
    """The requests that run together on one lane.

    Attributes:
        lane: the lane, whose rows are in the order of `requests`.
        alone: whether the only request is that of a stream, whose errors are raised. In
            a batch, a request that fails keeps nothing of the round; the others go on.
        sequential: the places of requests whose rows are decided one by one, see
            `engine.round.sequential`.
        interrupt: a `BaseException`, to be raised after the round; None: there is none.
    """

    def __init__(
        self,
        lane: RequestLane,
        requests: SequenceOf[Request],
        clock: RoundClock,
        *,
        alone: bool,
    ) -> None:
        self.lane, self.clock, self.alone = lane, clock, alone
        self.interrupt: BaseException | None = None
        self.take(requests)

    def failure(self, error: BaseException) -> Exception:
        """Return the error that ends one request of a batch; raise it if alone."""
        if self.alone:
            raise error
        if isinstance(error, Exception):
            return error
        # Signals wait for the round's end, so other code has raised this error.
        self.interrupt = error
        return SpeculationError(
            f"{type(error).__name__} was raised while this row took the tokens of a "
            "round, by other code than a signal's handler. The row ends with what it "
            "had before; insert its request again."
        )

    def take(self, requests: SequenceOf[Request]) -> None:
        """Replace the requests."""
        self.requests = requests
        each = [one.verifier.chooser.processors for one in requests]
        self.masked = any(one.masks is not None for one in requests)
        self.sequential = {
            place for place, processors in enumerate(each) if not processors.parallel
        }
        self.explain = any(one.explain for one in requests)
        # By place, the processors that have a state. Most have none.
        self.stateful = {
            i: processors for i, processors in enumerate(each) if processors.has_state
        }

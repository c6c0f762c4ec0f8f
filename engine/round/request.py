"""Requests, each put together once, and those that run together on a lane."""

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
    """One request, as its decoder and a batch see it."""

    target: Lane  # the target's lane; `sequence.tokens[target.seen:]` is to be fed
    sequence: Sequence  # the known tokens; grows with every round
    verifier: Verifier  # decides for the request
    # Proposes what can be verified as it is, see `engine.drafters.fault_guard`; None
    # for plain decoding
    drafter: OpenDrafter | None
    policy: DraftLengthPolicy  # decides how many tokens to propose in a round
    # How many nodes a draft may have that is a tree; 0: drafts are chains
    tree: int = 0
    # Decides on the target's rows in the place of the verifier, see
    # `engine.distributed`; None: that does
    decisions: Verifier | None = None
    # Rehearses shapes of rounds; None: they need no rehearsal
    warmup: Warmup | None = None
    masks: Masks | None = None  # what its constraint allows, if it has one
    # Report log-probabilities, and this many of the most probable ids; None: report
    # nothing
    top: int | None = None
    # Keep each round's plan and what became of it, and divide its time exactly, see
    # `engine.timing`
    explain: bool = False
    statistics: Statistics = field(default_factory=Statistics)  # what is counted
    clock: RoundClock = field(default_factory=_clock)  # of the round that is running

    @property
    def open_drafter(self) -> OpenDrafter:
        """The drafter; one that proposes nothing for plain decoding."""
        return self.drafter or OpenDrafter()

    @property
    def drafts(self) -> bool:
        """Return whether it may ever be drafted for."""
        return self.drafter is not None and self.policy.longest > 0

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
        lane: the lane, in which they have the same places.
        clock: of the round that is running.
        alone: whether there is one that has a lane for itself; what it raises is raised
            then. Of others, one that fails keeps nothing of the round, and they go on.
        requests: as passed.
        masked: whether one of them has a constraint.
        sequential: the places of those whose rows are decided one after the other, see
            `engine.round.sequential`.
        explain: whether the round's time is divided exactly.
        interrupt: what is to be raised after a round that others have gone through.
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
        """Return what ends one request, while others go on; alone, it is raised."""
        if self.alone:
            raise error
        if isinstance(error, Exception):
            return error
        self.interrupt = error  # not of a signal: these wait
        return SpeculationError(
            f"{type(error).__name__} was raised while this row took the tokens of a "
            "round, by other code than a signal's handler. The row ends with what it "
            "had before; insert its request again."
        )

    def take(self, requests: SequenceOf[Request]) -> None:
        """Let these be the requests from now on."""
        self.requests = requests
        each = [one.verifier.chooser.processors for one in requests]
        self.masked = any(one.masks is not None for one in requests)
        self.sequential = {
            place for place, processors in enumerate(each) if not processors.parallel
        }
        self.explain = any(one.explain for one in requests)
        # Of those that have a state, by place; asked once, as most have none.
        self.stateful = {
            i: processors for i, processors in enumerate(each) if processors.has_state
        }

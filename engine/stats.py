"""Statistics of a generation."""

from dataclasses import dataclass, field, fields
from itertools import zip_longest

from mlx_speculation.engine.timing import RoundSeconds


@dataclass(slots=True)
class SourceCounts:
    """Counts of one kind of drafter."""

    drafts: int = 0  # rounds with a draft of this kind
    drafted: int = 0
    accepted: int = 0

    def add(self, drafts: int, drafted: int, accepted: int) -> None:
        """Add counts."""
        self.drafts += drafts
        self.drafted += drafted
        self.accepted += accepted


@dataclass(frozen=True, slots=True)
class DrafterFault:
    """Fault for which a drafter is disabled for the rest of a stream."""

    drafter: str  # the name of the drafter's class
    call: str  # the drafter's method that failed, such as "propose"
    reason: str  # the error, or the fault of the draft, in one line
    details: str  # the traceback; without an error, the reason again

    def __str__(self) -> str:
        return (
            f"The drafter {self.drafter} is disabled, and the text goes on without it: "
            f"{self.call}() failed with {self.reason} (stats.drafter_faults has the "
            "traceback)"
        )


@dataclass(slots=True)
class Statistics:
    """Counts and times of one generation.

    Attributes:
        rounds: forwards of the target after prefill that emitted tokens.
        drafts: rounds with at least one drafted token.
        accepted: accepted tokens, before a cut at a stop or the budget.
        emitted: generated tokens, after that cut.
        reached: at index i, how often at least i + 1 drafted tokens were accepted.
        sources: drafts, drafted and accepted tokens by the kind of drafter.
        empty_drafts: rounds in which the drafter was asked and proposed nothing.
        drafter_faults: the faults for which drafters were disabled.
        paused: the reason why fewer than half of the rounds had drafts, if it is known
            and drafts were requested; else empty.
        reads: how often the host waited for the device, besides once per round: for
            drafters that may stop early, and for masks of a constraint.
        reruns: partial acceptances that ran the target again, because a recurrent mixer
            was not recorded.
        mixer_reruns: partial acceptances in which a recurrent mixer of the target ran
            again over its inputs, because the mixer has no replay (mamba, jamba, rwkv7)
            or the record of its call is incomplete.
        reused: prompt tokens that the target did not read: the prefix cache held them.
        reused_from_disk: reused tokens that were only in files.
        prefill_seconds: time in which target and drafter read the prompt, and time of
            preparations, such as a look-up in the prefix cache.
        draft_seconds: time of the rounds until the drafted tokens are computed.
        verify_seconds: time after that until the target's logits are computed; in plain
            steps, all time until then. Includes the replay of recurrent layers, which
            is computed with the next forward.
        sampler_seconds: time after that until the tokens are chosen and counted.
        host_seconds: the other time of the rounds, in which the host works and does not
            wait, see `engine.timing`.
    """

    rounds: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    reached: list[int] = field(default_factory=list)
    sources: dict[str, SourceCounts] = field(default_factory=dict)
    empty_drafts: int = 0
    drafter_faults: list[DrafterFault] = field(default_factory=list)
    paused: str = ""
    reads: int = 0
    reruns: int = 0
    mixer_reruns: int = 0
    reused: int = 0
    reused_from_disk: int = 0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    sampler_seconds: float = 0.0
    host_seconds: float = 0.0

    def count(
        self,
        drafted: int,
        accepted: int,
        emitted: int,
        source: str = "drafter",
        first: int = 0,
    ) -> None:
        """Count one round, and its draft by the kind of drafter.

        `first` is 1 if a plain step was in flight, which counts as one more round.
        """
        self.rounds += first + (emitted > 0)
        self.emitted += first + emitted
        if drafted and emitted:
            self.drafts += 1
            self.drafted += drafted
            self.accepted += accepted
            self.reached += [0] * (drafted - len(self.reached))
            for index in range(accepted):
                self.reached[index] += 1
            counts = self.sources.setdefault(source, SourceCounts())
            counts.add(1, drafted, accepted)

    def add(self, other: "Statistics") -> None:
        """Add the counts and times of another generation; `paused` stays."""
        for name in (each.name for each in fields(self) if each.default == 0):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        pairs = zip_longest(self.reached, other.reached, fillvalue=0)
        self.reached = [*map(sum, pairs)]
        for source, more in other.sources.items():
            counts = self.sources.setdefault(source, SourceCounts())
            counts.add(more.drafts, more.drafted, more.accepted)
        self.drafter_faults += other.drafter_faults

    def spend(self, seconds: RoundSeconds) -> None:
        """Add the time of a round."""
        self.draft_seconds += seconds.draft
        self.verify_seconds += seconds.verify
        self.sampler_seconds += seconds.sampler
        self.host_seconds += seconds.host

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens; 0 without drafts."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_accepted_length(self) -> float:
        """Mean tokens of a round with a draft: 1 + accepted / drafts."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def accepted_per_position(self) -> tuple[float, ...]:
        """At index i, the share of all drafts whose token i was accepted."""
        return tuple(count / self.drafts for count in self.reached)

    @property
    def tokens_per_round(self) -> float:
        """Emitted tokens over rounds."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def decode_seconds(self) -> float:
        """Time of all rounds, without prefill: the four parts together."""
        device = self.draft_seconds + self.verify_seconds + self.sampler_seconds
        return device + self.host_seconds

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens over the time of all rounds, without prefill."""
        return self.emitted / self.decode_seconds if self.decode_seconds else 0.0

"""Statistics of a generation."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from mlx_speculation.engine.timing import RoundSeconds


@dataclass(slots=True)
class SourceCounts:
    """Counts of one kind of drafter."""

    drafts: int = 0  # rounds with its drafts
    drafted: int = 0  # its tokens
    accepted: int = 0  # those accepted


@dataclass(frozen=True, slots=True)
class DrafterFault:
    """Why a drafter is disabled for the rest of a stream."""

    drafter: str  # the name of its class
    call: str  # "begin", "propose", "settle" or "discard"
    reason: str  # what was raised, or what is wrong with its draft, in a line
    details: str  # the traceback, or again the reason

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
        rounds: forwards of the target after prefill that brought tokens.
        drafts: rounds with at least one drafted token.
        drafted: drafted tokens.
        accepted: accepted tokens, before a cut at a stop or the budget.
        emitted: generated tokens, after that cut.
        reached: how often at least i + 1 drafted tokens were accepted, for each i.
        sources: drafts, drafted and accepted tokens by the kind of drafter.
        empty_drafts: rounds in which the drafter was asked and proposed nothing.
        drafter_faults: the drafters that have failed, and how; each is disabled for
            the rest of the stream, and the text goes on without it.
        paused: why nothing was drafted, or in the end nothing any more; empty
            otherwise, and where nothing was to be drafted.
        reads: how often the host waited for the device beside the one time in each
            round: for a drafter that may stop early, in the middle of a draft; for a
            constraint, which has to know the tokens before a row.
        reruns: partial acceptances that ran the target again, because a recurrent
            mixer is not on record.
        mixer_reruns: partial acceptances in which a recurrent mixer of the target ran
            again over its inputs, because it has no recipe (mamba, jamba, rwkv7), or
            what was noted of its call is not complete.
        reused: prompt tokens that the prefix cache held, which the target did not
            read again.
        reused_from_disk: those of them that were in files alone.
        prefill_seconds: time from the start to the first round.
        draft_seconds: time of the rounds until the drafted tokens are there.
        verify_seconds: from there until the target's logits are there; in plain steps
            all time until then. A replay of recurrent layers is computed with the
            next forward and is in here.
        sampler_seconds: from there until the tokens are chosen and counted.
        host_seconds: time of the rounds in which the host works and nothing that it
            waits for is on its way; see `engine.timing` for all four.
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
        """Count one round, and by the drafter's kind what was drafted in it.

        Of a plain step that came first its own token is counted by itself, as `first`.
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
            counts.drafts += 1
            counts.drafted += drafted
            counts.accepted += accepted

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens; 0 without drafts."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_accepted_length(self) -> float:
        """1 + accepted / drafts: tokens per drafting round with its bonus."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def accepted_per_position(self) -> tuple[float, ...]:
        """The share of all drafts in which position i was accepted."""
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


def spend(each: Iterable[Statistics], seconds: RoundSeconds) -> None:
    """Add the time of a round to the counts of all requests that took part in it."""
    for counts in each:
        counts.draft_seconds += seconds.draft
        counts.verify_seconds += seconds.verify
        counts.sampler_seconds += seconds.sampler
        counts.host_seconds += seconds.host

"""One stream on all ranks: what rank 0 decides, and what the others do about it.

    others                rank 0
    begin, and what with    compares, and says "begun" or what differs
    ready                   plan: how many tokens to draft, told when all are ready
    (the device)            the tokens of the draft, and what the round emits
    ready                   "close", when its user has had enough

The others wait for rank 0 on the link, where a rank that is lost ends the wait, and
rank 0 waits there for them, before any of them goes into mlx.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from mlx_speculation.engine.lengths import Plan
from mlx_speculation.engine.rank_link import Message
from mlx_speculation.engine.ranks import Ranks
from mlx_speculation.errors import (
    NonFiniteLogitsError,
    RankLostError,
    RankMismatchError,
    SpeculationError,
)
from mlx_speculation.samplers import Sampling

# An error inside of mlx may come before the link has said why.
KNOWN_SECONDS = 2.0


class ClosedByRank0Error(Exception):
    """Ends the stream of another rank where rank 0 has ended its own.

    Attributes:
        taken_back: how many of the known tokens go, or None: the stream was dropped,
            and nothing is done with its caches any more.
    """

    def __init__(self, taken_back: int | None) -> None:
        super().__init__(taken_back)
        self.taken_back = taken_back


class Together:
    """This rank's side of one stream.

    Args:
        ranks: the ranks of the generator.
        fields: what has to be the same on all ranks, by the name of the option.
        needs: on rank 0, what of the target its drafter needs all ranks for.
    """

    def __init__(
        self, ranks: Ranks, fields: Mapping[str, Any], *, needs: Sequence[str]
    ) -> None:
        self.ranks, self.stream = ranks, ranks.next_number()
        self._fields = dict(fields)
        self._needs = list(needs)
        self._begun = self._ended = False
        self.closed: ClosedByRank0Error | None = None

    @property
    def decides(self) -> bool:
        """Whether this is rank 0."""
        return self.ranks.rank == 0

    @property
    def running(self) -> bool:
        """Whether the others count on this rank."""
        return self._begun and not self._ended

    def with_seed(self, sampling: Sampling | None) -> Sampling:
        """Return the options with a seed, the same on all ranks."""
        return self.ranks.with_seed(sampling or Sampling(), self.stream)

    def expect(self, fields: Mapping[str, Any]) -> None:
        """Add what has to be the same on all ranks."""
        self._fields |= fields

    def begin(self) -> list[str]:
        """Wait for all ranks to begin this stream, with the same options.

        Returns:
            What rank 0's drafter needs all ranks for.

        Raises:
            RankMismatchError: an option differs; on all ranks, and nothing has run.
            RankLostError: a rank is gone.
        """
        self._begun = True
        if not self.decides:
            loss = self.ranks.link.loss(self.stream)
            if loss is not None:  # else rank 0 would begin, and wait for this one
                raise self.ranks.link.error(loss)
            self._say("begin", self._fields)
            said = self._hear(0, "begun")
        else:
            link = self.ranks.link
            found = [self._hear(rank, "begin")[0] for rank in link.others]
            wrong = [
                self._difference(rank, theirs)
                for rank, theirs in zip(link.others, found, strict=True)
            ]
            said = [next((each for each in wrong if each), ""), self._needs]
            self._say("begun", *said)
        if said[0]:
            self._ended = True
            raise RankMismatchError(said[0])
        return list(said[1])

    def plan(self, plan: Plan | None) -> Plan:
        """Return rank 0's plan on every rank; others pass None."""
        if self.decides:
            assert plan is not None
            self._wait_for_all()
            self._say("plan", plan.length, plan.reason)
            return plan
        self._say("ready")
        length, reason = self._hear(0, "plan")
        return Plan(length, reason)

    def tell_draft(self, length: int, source: str) -> None:
        """Tell how many tokens were drafted."""
        self._say("draft", length, source)

    def hear_draft(self) -> tuple[int, str]:
        """Return how many tokens rank 0 has drafted, and who did."""
        length, source = self._hear(0, "draft")
        return length, source

    def told(self, array: mx.array) -> mx.array:
        """Return rank 0's array on every rank, not evaluated."""
        return self.ranks.told(array)

    def close(self, taken_back: int | None) -> None:
        """Tell that this rank ends the stream here, if anyone counts on it."""
        if self._ended:
            return
        self._ended = True
        if self.decides:
            self._say("close", taken_back)
        else:
            self._leave("the stream was dropped", "")

    def end(self, error: BaseException | None = None) -> None:
        """Note that the stream has ended on this rank, as on all others or by error."""
        if self.running and error is not None and self.closed is None:
            self._ended = True
            self._leave(f"{type(error).__name__}: {error}", type(error).__name__)
        self._ended = True

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Run what may wait in mlx; what it raises says who was lost, if anyone was.

        Raises:
            RankLostError: in place of what mlx raises when a rank is lost.
        """
        link = self.ranks.link
        with link.inside(self.stream):
            try:
                yield
            except NonFiniteLogitsError as error:
                # By this a rank 0 that fails lets the others come out of a round.
                loss = None if self.decides else link.loss(self.stream, KNOWN_SECONDS)
                if loss is not None and loss.error != NonFiniteLogitsError.__name__:
                    raise link.error(loss) from error
                raise
            except (SpeculationError, ClosedByRank0Error, StopIteration):
                raise
            except Exception as error:
                wait = KNOWN_SECONDS if isinstance(error, RuntimeError) else 0.0
                loss = link.loss(self.stream, wait)
                if loss is not None:
                    raise link.error(loss) from error
                raise
            finally:
                if self._ended:
                    link.forget(self.stream)

    def _wait_for_all(self) -> None:
        for rank in self.ranks.link.others:
            self._hear(rank, "ready")

    def _leave(self, why: str, error: str) -> None:
        why = f"its program has left the stream: {' '.join(why.split())[:500]}"
        self._say("left", self.ranks.rank, why.rstrip("."), error)

    def _say(self, kind: str, *what: Any) -> None:
        self.ranks.link.send([kind, self.stream, *what])

    def _hear(self, rank: int, kind: str) -> Message:
        """Return what the next message of a rank says."""
        found, _, *what = self.ranks.link.receive(rank, self.stream)
        if found == "close":
            self.closed = ClosedByRank0Error(*what)
            raise self.closed
        if found != kind:
            names = self.ranks.link.names
            raise RankLostError(
                f"{names[rank].capitalize()} says {found!r}, and {kind!r} was expected "
                f"on {names[self.ranks.rank]}: the programs have come apart. Run the "
                "same program on every rank."
            )
        return what

    def _difference(self, rank: int, theirs: Mapping[str, Any]) -> str:
        """Return what another rank has another value of, or nothing."""
        for name, ours in self._fields.items():
            if theirs.get(name) != ours:
                return (
                    f"{name} is {theirs.get(name)} on rank {rank}, and {ours} on rank "
                    "0. Run the same program with the same models and options on every "
                    "rank."
                )
        return ""

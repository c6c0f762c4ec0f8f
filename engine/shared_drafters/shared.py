"""The base class of drafters of many requests, and the chain that they choose."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import mlx.core as mx

from mlx_speculation.engine.drafters.base import NOTHING, OpenDrafter, Proposal
from mlx_speculation.engine.drafters.fault_guard import what_is_wrong
from mlx_speculation.engine.prompt import Sequence as Tokens
from mlx_speculation.models import Lane
from mlx_speculation.samplers import Ask, Rows, Verifier, peaks, propose_all

Failed = dict[int, Exception]  # what requests' own processors have raised, by place


class Drafted(Protocol):
    """A request, as far as it concerns drafters; see `engine.round.request`."""

    @property
    def target(self) -> Lane:
        """The target's lane."""
        ...

    @property
    def sequence(self) -> Tokens:
        """The known tokens."""
        ...

    @property
    def verifier(self) -> Verifier:
        """Decides for the request."""
        ...

    @property
    def open_drafter(self) -> OpenDrafter:
        """Its drafter, whose `shared` is of one kind with those of the others."""
        ...

    @property
    def drafts(self) -> bool:
        """Return whether it may ever be drafted for."""
        ...


class SharedDrafter(ABC):
    """Drafts for many requests with caches of its own, which hold them together.

    `follow` comes before every round. The calls of one that drafts: `prepare`,
    `propose`, then `settle` and `done`, or `discard`. It drafts behind no token that is
    not read.
    """

    def __init__(self) -> None:
        self._requests: list[Drafted] = []  # those in the caches, in their order
        self._places: list[int] = []  # where they stand in the round
        self._round: Any = None
        self._chain: SharedChain | None = None

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of what it holds for all requests together."""

    def met_new_shapes(self) -> bool:
        """Return whether a lane of its own met new shapes since the last call."""
        return False

    def follow(self, requests: Sequence[Drafted]) -> None:
        """Take notice of the requests of the next round, in their order."""
        self.done()

    def within(self, requests: Sequence[Drafted], limits: list[int]) -> list[int]:
        """Return how many tokens each request can draft, of at most its limit."""
        return limits

    def prepare(self, requests: Sequence[Drafted], limits: Sequence[int]) -> None:
        """Read of the requests what no round should be measured with: prompts."""
        return

    def propose(
        self, requests: Sequence[Drafted], limits: Sequence[int]
    ) -> tuple[list[Proposal], Failed]:
        """Return a draft of each request, of at most its limit; 0 and less: none."""
        result, failed = [NOTHING] * len(requests), Failed()
        with self._disabling("propose", requests):
            self._place(requests)
            most = self._most([max(0, limits[place]) for place in self._places])
            if any(most):
                drafts = self._drafted(most)
                assert self._chain is not None
                for index, (place, draft) in enumerate(
                    zip(self._places, drafts, strict=True)
                ):
                    result[place] = draft
                    if index in self._chain.failed:
                        failed[place] = self._chain.failed[index]
        return result, failed

    def settle(self, accepted: Sequence[int]) -> None:
        """Keep so many tokens of each request's draft; below 0: it has failed.

        Legal once the round was read. Raises nothing for what a drafter does.
        """
        if self._round is None or self._chain is None:
            return
        self._chain.disable_unusable()
        with self._disabling("settle", self._requests):
            self._keep([max(0, accepted[place]) for place in self._places])

    def discard(self) -> None:
        """Undo the last `propose` and `settle`. Never raises."""
        if self._round is not None:
            self._round.rollback()
        self.done()

    def done(self) -> None:
        """Let go of what could undo the round: the target has committed its own."""
        self._round = self._chain = None

    def give_back(self, request: Drafted) -> None:
        """Let a request's own drafter hold a copy of its caches, to keep them."""
        if request in self._requests:
            with self._disabling("remember", [request]):
                self._extract(self._requests.index(request))

    @abstractmethod
    def take_back(self, request: Drafted) -> None:
        """Let go of that copy again."""

    @abstractmethod
    def _extract(self, index: int) -> None:
        """Let the drafter of one of its requests hold a copy of its caches."""

    @abstractmethod
    def leave(self, gone: Sequence[Drafted]) -> None:
        """Let go of requests, and of those whose drafter is disabled."""

    @abstractmethod
    def _most(self, limits: list[int]) -> list[int]:
        """Return how many tokens of those in the caches can be drafted now."""

    @abstractmethod
    def _drafted(self, most: list[int]) -> list[Proposal]:
        """Draft the longest chain for all; return each request's, of at most `most`."""

    @abstractmethod
    def _keep(self, accepted: list[int]) -> None:
        """Keep in the caches what is of committed text."""

    @contextmanager
    def _disabling(self, call: str, requests: Sequence[Drafted]) -> Iterator[None]:
        """Give up on the drafter for these requests where it raises; texts go on.

        As for one request, see `engine.drafters.fault_guard`. Its round is undone.

        Raises:
            BaseException: what is no fault of a drafter, such as MemoryError.
        """
        try:
            yield
        except BaseException as error:
            self.discard()
            if not isinstance(error, Exception) or isinstance(error, MemoryError):
                raise
            for request in requests:
                request.open_drafter.shared.fail(call, error)
            self.leave(requests)

    def _place(self, requests: Sequence[Drafted]) -> None:
        """Find where its requests stand in the round."""
        order = {id(request): place for place, request in enumerate(requests)}
        self._places = [order[id(request)] for request in self._requests]

    def _staying(self, gone: Sequence[Drafted]) -> list[int]:
        """Return which of its requests are not gone, and have a drafter still."""
        lost = {id(request) for request in gone}
        return [
            index
            for index, request in enumerate(self._requests)
            if id(request) not in lost and not request.open_drafter.shared.disabled
        ]


class SharedChain:
    """Drafts for some requests of one round, lazy.

    Args:
        requests: for whom.
        ids: the target's ids of the drafter's logits, uint32 [n]; None: all.

    Attributes:
        unusable: bool [requests], whether logits of one could not be used.
        failed: what requests' own processors have raised, by their index.
    """

    def __init__(
        self, requests: Sequence[Drafted], ids: mx.array | None = None
    ) -> None:
        self._requests, self._ids = requests, ids
        self._columns: list[mx.array] = []
        self._probs: list[list[mx.array]] = [[] for _ in requests]
        self.unusable = mx.zeros((len(requests),), mx.bool_)
        self.failed = Failed()
        self._asks: list[Ask] = []
        self._firsts: list[int] = []
        self._alone: list[int] = []
        self._replaces = False
        for index, one in enumerate(requests):
            verifier, known = one.verifier, one.sequence
            self._asks.append(Ask(verifier, Rows(known.tokens, start=known.start)))
            self._firsts.append(known.start + len(known.tokens))
            # As alone, unusable logits are replaced only where they could do harm.
            self._replaces = self._replaces or not verifier.tolerates_invalid_logits
            if verifier.shared is None:
                self._alone.append(index)

    def choose(self, logits: mx.array, ids: mx.array | None = None) -> mx.array:
        """Choose the next token of every request, uint32 [requests], and submit it.

        Args:
            logits: [requests, vocab], or [requests, n] of the ids.
            ids: other ids than those of the chain, uint32 [n].
        """
        usable = mx.isfinite(peaks(logits))
        self.unusable = self.unusable | ~usable
        if self._replaces:
            logits = mx.where(usable[:, None], logits, mx.array(0, logits.dtype))
        ids = self._ids if ids is None else ids
        positions = [first + len(self._columns) for first in self._firsts]
        proposed = propose_all(self._asked(), positions, logits, ids)
        self.failed |= proposed.failed
        for index, probs in proposed.probs.items():
            self._probs[index].append(probs)
        self._columns.append(proposed.tokens)
        mx.async_eval(proposed.tokens)  # runs while the next step's graph is built
        return proposed.tokens

    def drafts(self, limits: Sequence[int], source: str) -> list[Proposal]:
        """Return each request's draft, cut to its limit."""
        mx.async_eval(self.unusable)
        tokens, result = mx.stack(self._columns, axis=1), []
        for index, limit in enumerate(limits):
            each = self._probs[index][:limit]
            probs = mx.concatenate(each) if each else None
            drafts = limit > 0 and index not in self.failed
            draft = Proposal(tokens[index, :limit], probs, source)
            result.append(draft if drafts else NOTHING)
        return result

    def disable_unusable(self) -> None:
        """Disable the drafter for requests with unusable logits, once read."""
        unusable: Any = self.unusable.tolist()
        for request, failed in zip(self._requests, unusable, strict=True):
            if failed:
                request.open_drafter.shared.fail("propose", what_is_wrong(1, 0))

    def _asked(self) -> list[Ask]:
        """Return what each request asks of the next token, behind those drafted."""
        if self._alone and self._columns:
            matrix = mx.stack(self._columns, axis=1)
            for index in self._alone:
                rows = self._requests[index].sequence.rows(matrix[index])
                self._asks[index] = replace(self._asks[index], rows=rows)
        return self._asks

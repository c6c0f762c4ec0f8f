"""The base class of shared drafters, and the chains of tokens that they choose."""

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

Failed = dict[int, Exception]  # errors of requests' own logits processors, by index


class Drafted(Protocol):
    """The part of a request that drafters use; see `engine.round.request`."""

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
        """The verifier, which chooses the tokens of the request."""
        ...

    @property
    def open_drafter(self) -> OpenDrafter:
        """The request's drafter; its `shared` has the same class in every request."""
        ...

    @property
    def drafts(self) -> bool:
        """Return whether the request may get drafts."""
        ...


class SharedDrafter(ABC):
    """Drafts for many requests, which share the drafter's caches.

    `follow` is called before every round. A round with drafts then calls `prepare` and
    `propose`, and after that either `settle` and `done`, or `discard`. Callers never
    call `propose` while a plain step is in flight.
    """

    def __init__(self) -> None:
        self._requests: list[Drafted] = []  # in their order in the caches
        self._places: list[int] = []  # their places in the round
        self._round: Any = None
        self._chain: SharedChain | None = None

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the shared caches."""

    def met_new_shapes(self) -> bool:
        """Return whether the drafter has run with a new shape since the last call."""
        return False

    def follow(self, requests: Sequence[Drafted]) -> None:
        """Prepare for the requests of the next round, in their order."""
        self.done()

    def within(self, requests: Sequence[Drafted], limits: list[int]) -> list[int]:
        """Return how many tokens each request can draft, at most its limit."""
        return limits

    def prepare(self, requests: Sequence[Drafted], limits: Sequence[int]) -> None:
        """Read prompts of the requests, before the time of the round is measured."""
        return

    def propose(
        self, requests: Sequence[Drafted], limits: Sequence[int]
    ) -> tuple[list[Proposal], Failed]:
        """Return each request's draft within its limit (below 1: none), and errors."""
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
        """Keep the first `accepted` tokens of each draft; numbers below 0 count as 0.

        Legal once the target's choices are read. An error only disables the drafter.
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
        """Forget how to undo the round."""
        self._round = self._chain = None

    def give_back(self, request: Drafted) -> None:
        """Copy a request's shared caches to its own drafter, for the prefix cache."""
        if request in self._requests:
            with self._disabling("remember", [request]):
                self._extract(self._requests.index(request))

    @abstractmethod
    def take_back(self, request: Drafted) -> None:
        """Drop the copy of caches that `_extract` gave to the drafter of a request."""

    @abstractmethod
    def _extract(self, index: int) -> None:
        """Give the drafter of a request a copy of the request's caches."""

    @abstractmethod
    def leave(self, gone: Sequence[Drafted]) -> None:
        """Let these requests leave, and all others whose drafter is disabled."""

    @abstractmethod
    def _most(self, limits: list[int]) -> list[int]:
        """Return how many tokens to draft for each request in the caches; []: none."""

    @abstractmethod
    def _drafted(self, most: list[int]) -> list[Proposal]:
        """Draft chains of equal length for all requests; cut each to its limit."""

    @abstractmethod
    def _keep(self, accepted: list[int]) -> None:
        """Keep only the rows of committed tokens in the caches."""

    @contextmanager
    def _disabling(self, call: str, requests: Sequence[Drafted]) -> Iterator[None]:
        """Disable the drafter for these requests if the context raises.

        The drafter's round is then undone. The texts go on, see
        `engine.drafters.fault_guard`.

        Raises:
            BaseException: an error that is no fault of a drafter, such as MemoryError.
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
        """Look up the places of the drafter's requests in the round."""
        order = {id(request): place for place, request in enumerate(requests)}
        self._places = [order[id(request)] for request in self._requests]

    def _staying(self, gone: Sequence[Drafted]) -> list[int]:
        """Return the indices of requests that stay and whose drafter is enabled."""
        lost = {id(request) for request in gone}
        return [
            index
            for index, request in enumerate(self._requests)
            if id(request) not in lost and not request.open_drafter.shared.disabled
        ]


class SharedChain:
    """Chains of tokens that a drafter chooses for a round's requests, as lazy arrays.

    Args:
        requests: the requests.
        ids: the target's ids of the drafter's logits, uint32 [n]; None: all ids.

    Attributes:
        unusable: bool [requests], whether a request got unusable logits.
        failed: errors of the requests' own logits processors, by index.
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
            # Unusable logits are replaced only if a verifier does not tolerate them.
            self._replaces = self._replaces or not verifier.tolerates_invalid_logits
            if verifier.shared is None:
                self._alone.append(index)

    def choose(self, logits: mx.array, ids: mx.array | None = None) -> mx.array:
        """Choose the next token of every request, uint32 [requests], and submit it.

        Args:
            logits: [requests, vocab], or [requests, n] for n ids.
            ids: the ids of these logits, uint32 [n]; None: those of the chain.
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
        """Read `unusable`; disable the drafter for requests with unusable logits."""
        unusable: Any = self.unusable.tolist()
        for request, failed in zip(self._requests, unusable, strict=True):
            if failed:
                request.open_drafter.shared.fail("propose", what_is_wrong(1, 0))

    def _asked(self) -> list[Ask]:
        """Return each request's `Ask` for the token after those drafted so far."""
        if self._alone and self._columns:
            matrix = mx.stack(self._columns, axis=1)
            for index in self._alone:
                rows = self._requests[index].sequence.rows(matrix[index])
                self._asks[index] = replace(self._asks[index], rows=rows)
        return self._asks

"""One running generation: an iterator of chunks that can be closed at any time.

If the target is sharded over ranks, all ranks yield the same chunks. An error on any
rank ends the text on all.
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass

from mlx_speculation import interrupts
from mlx_speculation.engine.detokenizer import ChunkQueue
from mlx_speculation.engine.distributed import ClosedByLeaderError, RankSession
from mlx_speculation.engine.draft_length.base import Feedback, Plan
from mlx_speculation.engine.memory import Memory
from mlx_speculation.engine.prefix_reuse import PrefixReuse
from mlx_speculation.engine.result import Chunk, Result
from mlx_speculation.engine.round.decoder import StreamDecoder
from mlx_speculation.engine.round.final_caches import FinalCaches
from mlx_speculation.engine.round.outcome import RoundOutcome
from mlx_speculation.engine.round.request import Request
from mlx_speculation.engine.stats import Statistics
from mlx_speculation.errors import (
    ContextLengthNotice,
    DrafterFaultWarning,
    SpeculationError,
)
from mlx_speculation.interrupts import DeferredSignals, finalize, raised_by_signal


@dataclass(eq=False, kw_only=True)
class Generation:
    """One request from its prompt to its result, run by a stream or by a batch."""

    decoder: StreamDecoder
    chunks: ChunkQueue
    caches: FinalCaches
    out_of_positions: bool  # whether the target's positions end before `max_tokens`
    seed: int
    running: AbstractContextManager[None]  # entered by `begin`, left at the end
    memory: Callable[[], Memory]
    prefixes: PrefixReuse | None  # None: no prefix cache is used
    # Gets the known tokens at the end, except after an error
    remember: Callable[[list[int]], None]
    session: RankSession | None  # None: there is only one rank
    result: Result | None = None  # None: the generation has not ended

    def __post_init__(self) -> None:
        self.request = self.decoder.request
        self._statistics = self.request.statistics
        self._tokens = self.request.sequence.tokens
        self._open = ExitStack()
        self._started = self._prompt_read = self._in_rounds = self._warned = False

    @property
    def cached_tokens(self) -> list[int]:
        """The known tokens that the target's caches hold now, in order."""
        return self._tokens[: self.request.target.seen]

    def begin(self, fits: Callable[[int], bool] | None = None) -> bool:
        """Read the part of the prompt that fits; return whether all of it was read.

        A further call, also after Ctrl-C, continues where the last one stopped. If
        there is nothing to generate, the text ends. `fits` returns whether a chunk of n
        tokens may be read now; None: always.
        """
        if not self._started:
            self._started = True
            interrupts.close_at_exit(self._open)
            self._open.enter_context(self.running)
            if self.prefixes is not None:
                self.prefixes.begin(self._tokens, self._statistics)
        if not self._prompt_read:
            self._prompt_read = self.decoder.prefill.target(fits)
        if self._prompt_read and not self._in_rounds:
            spent = self._statistics.emitted == self.chunks.max_tokens
            if spent or self.request.complete:
                self.end("length" if spent else "stop")
            else:
                self._in_rounds = True
        return self._prompt_read

    def advance(self) -> None:
        """Run the next round, unless chunks are ready or nothing is to be generated.

        An error ends the text, unless a signal handler has raised it.
        """
        chunks = self.chunks
        if self.result is not None or chunks.ready:
            return
        try:
            if not self._in_rounds and not (self.begin() and self._in_rounds):
                return
            # A round without a plan begins on all ranks when they exchange its plan
            if self.session is not None and self.decoder.planned:
                self.session.turn()
            budget = chunks.max_tokens - self._statistics.emitted
            known = len(self._tokens)
            try:
                (outcome,) = self.decoder.next_round([budget], [chunks.cut])
                assert isinstance(outcome, RoundOutcome)  # else it was raised
                chunks.reason = outcome.reason
            except BaseException:
                if len(self._tokens) == known:  # the round was undone
                    chunks.undo()
                raise
            if self.prefixes is not None:
                self.prefixes.between_rounds()
            if chunks.reason is not None:
                self.caches.after_last_round()
            if self._statistics.drafter_faults:
                self.warn_of_faults()
        except ClosedByLeaderError as closed:
            self.close(closed.taken_back)
        except Exception as error:
            if not raised_by_signal(error):
                self.end("error")
            raise

    def end_if_taken(self) -> None:
        """End the text if its last chunk was taken."""
        chunks = self.chunks
        if self.result is None and chunks.reason is not None and not chunks.ready:
            self.end(chunks.reason)

    def warn_of_faults(self) -> None:
        """Warn once that a drafter is disabled."""
        faults = self._statistics.drafter_faults
        if faults and not self._warned:
            self._warned = True
            warnings.warn(str(faults[0]), DrafterFaultWarning, stacklevel=4)

    def close(self, taken_back: int = 0) -> None:
        """End the text now, and drop the last `taken_back` known tokens."""
        with DeferredSignals():
            if self.result is None:
                if taken_back:
                    self.caches.take_back(taken_back)
                self.end("closed")

    def end(self, reason: str) -> None:
        """Settle the caches, set the result and fill the prefix cache."""
        error = sys.exception() if reason == "error" else None
        if reason == "length" and self.out_of_positions:
            warnings.warn(
                "The text ends before max_tokens, because the model has no more "
                "positions. Shorten the prompt.",
                ContextLengthNotice,
                stacklevel=4,
            )
        try:
            with DeferredSignals():  # handles signals at its end
                if self._started:
                    self.caches.settle(reason)
                self._set_result(reason)
                self._leave_prefixes(reason)
        except BaseException as second:
            error = error or second
            raise
        finally:
            if self.session is not None:
                self.session.end(error)

    def _set_result(self, reason: str) -> None:
        known, taken = self.caches.hold_all and reason != "error", self.chunks.taken
        logprobs = [one.logprob for one in taken if one.logprob is not None]
        self.chunks.ready.clear()
        self._open.close()
        self._note_pause()
        self.result = Result(
            text="".join(chunk.text for chunk in taken),
            tokens=[chunk.token for chunk in taken],
            finish_reason=reason,
            stats=self._statistics,
            seed=self.seed,
            cached_tokens=self.cached_tokens,
            next_token=self.caches.next_token() if known else None,
            memory=self.memory(),
            logprobs=None if self.request.top is None else logprobs,
            origins=tuple(chunk.origin for chunk in taken),
        )

    def _note_pause(self) -> None:
        """Note in the statistics why fewer than half of the rounds had drafts."""
        counts, plan = self._statistics, self.decoder.followed
        few = 2 * counts.drafts < counts.rounds
        if not self.request.drafts or counts.drafter_faults or not few:
            return
        if plan is not None and (plan.declined or not counts.drafts):
            counts.paused = plan.drawback
        elif not counts.drafts:
            empty = counts.empty_drafts > 0
            counts.paused = "nothing was proposed" if empty else "the text is short"

    def _leave_prefixes(self, reason: str) -> None:
        """Store the known tokens for later requests, except after an error."""
        if self.prefixes is not None and reason == "error":
            self.prefixes.forget()
        if not self._started or reason == "error":
            return
        if self.prefixes is not None:
            self.prefixes.store(self._tokens)
        self.remember(self._tokens)

    def drop(self) -> None:
        """Exit the entered contexts; store committed tokens in the prefix cache."""
        self._open.close()
        if self.prefixes is not None and self._started and self.result is None:
            self.prefixes.store_dropped(self._tokens)


class Stream:
    """Yields one `Chunk` per emitted token.

    After the last chunk or `close()`, a `prompt_cache` of the caller holds exactly
    `cached_tokens`: the prompt, the yielded tokens, and at most the rest of one round.
    After an error it holds the tokens committed before the failing round. Ctrl-C, like
    any exception of a signal handler, is raised at the end of a round or of a chunk of
    the prompt. It closes the stream in `next`, and leaves it open in `next_round`.
    """

    _ending = staticmethod(sys.is_finalizing)  # globals are None when Python exits

    def __init__(self, generation: Generation) -> None:
        self.generation, self._session = generation, generation.session

    @property
    def request(self) -> Request:
        """The request."""
        return self.generation.request

    @property
    def stats(self) -> Statistics:
        """Counts and times so far."""
        return self.request.statistics

    @property
    def decisions(self) -> list[tuple[Plan, Feedback]]:
        """The plan of each round, with its reasons, and the feedback after the round.

        Raises:
            SpeculationError: the stream was not started with `explain=True`.
        """
        if not self.request.explain:
            raise SpeculationError(
                "The stream keeps no decisions, since explain was False. Start it with "
                "explain=True."
            )
        return self.generation.decoder.decisions

    @property
    def seed(self) -> int:
        """Seed of the text at a temperature above 0."""
        return self.generation.seed

    @property
    def cached_tokens(self) -> list[int]:
        """The known tokens that the target's caches hold now, in order."""
        return self.generation.cached_tokens

    @property
    def ended(self) -> bool:
        """Return whether the text has ended."""
        return self.generation.result is not None

    @property
    def result(self) -> Result:
        """The result, once the text has ended.

        Raises:
            SpeculationError: the stream is still running.
        """
        if self.generation.result is None:
            chunks = self.generation.chunks
            raise SpeculationError(
                f"The stream has yielded {len(chunks.taken)} of at most "
                f"{chunks.max_tokens} tokens and is still running. Read it to its end, "
                "or call close() first."
            )
        return self.generation.result

    def close(self) -> None:
        """End the text, unless it has ended; a follower runs until rank 0 ends it."""
        if self.ended or self._ending():
            return
        session, generation = self._session, self.generation
        chunks = generation.chunks
        taken_back = len(chunks.ready) if generation.caches.yielded_only else 0
        if session is None:
            generation.close(taken_back)
        elif session.leads or not session.running:
            with session.group.inside():
                session.close(taken_back)
                generation.close(taken_back)
        else:
            chunks.ready.clear()
            for _ in self:
                pass

    def next_round(self, fits: Callable[[int], bool] | None = None) -> list[Chunk]:
        """Run one round, and return its chunks; an empty list: the stream has ended.

        If `next` has yielded only a part of a round, the rest is returned and no round
        is run. An exception of a signal handler leaves the stream open, in its state
        before the round. `fits` returns whether the drafter may read a chunk of n
        prompt tokens now; None: the drafter reads the whole prompt before its first
        draft.
        """
        self.generation.decoder.fits = fits
        with DeferredSignals(checkpoints=True):
            self.generation.advance()
            result = self.generation.chunks.take()
            self.generation.end_if_taken()
            return result

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        generation, session = self.generation, self._session
        chunks = generation.chunks
        count = len(chunks.taken)
        try:
            with (
                nullcontext() if session is None else session.group.inside(),
                DeferredSignals(checkpoints=True),
            ):
                generation.advance()
                if generation.result is not None:
                    raise StopIteration
                (chunk,) = chunks.take(1)
                if chunks.reason is not None:
                    generation.end_if_taken()
                if session is not None:
                    session.settled()
                return chunk
        except BaseException:
            if generation.result is None:  # raised by a signal handler
                if len(chunks.taken) > count:  # the caller has not got the chunk
                    chunks.put_back()
                self.close()
            raise

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        follows = self._session is not None and not self._session.leads
        if kind is not None and follows and not self.ended:
            self.generation.end("error")  # tells rank 0
        else:
            self.close()

    def __del__(self, finalize: Callable[..., None] = finalize) -> None:
        """Exit the entered contexts; store committed tokens in the prefix cache."""
        if self.generation.result is None:
            finalize(self.generation.drop)

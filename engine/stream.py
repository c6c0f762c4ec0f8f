"""One running generation: an iterator of chunks that can be closed at any time.

Where the target is on several ranks, all of them yield the same chunks. Rank 0 says
where the text ends, unless a rank leaves by an error, which ends it for all.
"""

import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext

from mlx_speculation import interrupts
from mlx_speculation.engine.detokenizer import TextDetokenizer
from mlx_speculation.engine.distributed import ClosedByLeaderError, RankSession
from mlx_speculation.engine.draft_length.base import Feedback, Plan
from mlx_speculation.engine.memory import Memory
from mlx_speculation.engine.prefix_reuse import PrefixReuse
from mlx_speculation.engine.prompt import say_out_of_positions
from mlx_speculation.engine.result import Chunk, Result
from mlx_speculation.engine.round import settle_caches
from mlx_speculation.engine.round.decoder import Decoder
from mlx_speculation.engine.round.outcome import RoundOutcome
from mlx_speculation.engine.round.request import Request
from mlx_speculation.engine.stats import Statistics
from mlx_speculation.errors import DrafterFaultWarning, SpeculationError
from mlx_speculation.interrupts import DeferredSignals, finalize, raised_by_signal


class Stream:
    """Yields one `Chunk` per emitted token.

    With the caller's own `prompt_cache`: after the last chunk or `close()` it holds
    exactly `cached_tokens`. These start with the prompt and the yielded tokens, and
    exceed them by less than one round. After an error they are what was committed
    before the failing round. Ctrl-C, as whatever else a signal's handler raises, waits
    for the end of a round or of a chunk of the prompt, and closes the stream.

    Args:
        decoder: runs the rounds.
        text: turns tokens into text.
        max_tokens: how many tokens to emit at most.
        out_of_positions: whether the target has no positions for more.
        seed: what the chooser was given, for the result.
        hold_all: let the caches hold the last token too when the stream ends.
        memory: counts the bytes that are held.
        prefixes: what earlier requests left, and what this one leaves; None: nothing.
        remember: gets the known tokens at the end, unless that is an error.
        yielded_only: see `SpeculativeGenerator.stream`.
        level_draft: see there.
        running: entered at the first chunk, left at the end.
        session: the stream on all ranks; None: there is one.

    Attributes:
        text: as passed.
        max_tokens: likewise.
        ready: chunks of the last round that were not yielded yet.
        reason: why the text ends with the last of them; None: it goes on.
        prefixes: as passed.
        ended: whether the result is there.
        prefill: has target and drafter read the prompt.
    """

    _ending = staticmethod(sys.is_finalizing)  # globals are None when it is needed

    def __init__(
        self,
        *,
        decoder: Decoder,
        text: TextDetokenizer,
        max_tokens: int,
        out_of_positions: bool = False,
        seed: int,
        hold_all: bool,
        running: AbstractContextManager[None],
        memory: Callable[[], Memory],
        prefixes: PrefixReuse | None = None,
        remember: Callable[[list[int]], None] | None = None,
        yielded_only: bool = False,
        level_draft: bool = False,
        session: RankSession | None = None,
    ) -> None:
        self._decoder = decoder
        self.prefill = decoder.prefill
        self._statistics = decoder.request.statistics
        self._sequence = decoder.request.sequence
        self.text = text
        self.max_tokens = max_tokens
        self._out_of_positions = out_of_positions
        self._seed = seed
        self._hold_all = hold_all
        self._running = running
        self._memory = memory
        self.prefixes = prefixes
        self._remember = remember
        self._yielded_only = yielded_only
        self._level_draft = level_draft
        self._session = session
        self._open = ExitStack()
        self._started = self._prompt_read = self._in_rounds = self._warned = False
        self.reason: str | None = None
        self.ready: deque[Chunk] = deque()
        self._yielded: list[Chunk] = []
        self._result: Result | None = None
        self.ended = False

    @property
    def request(self) -> Request:
        """The request of its rounds."""
        return self._decoder.request

    @property
    def stats(self) -> Statistics:
        """Counts and times so far."""
        return self._statistics

    @property
    def decisions(self) -> list[tuple[Plan, Feedback]]:
        """Each round's plan, with what it was chosen by, and what became of it.

        Raises:
            SpeculationError: the stream was not started with `explain=True`.
        """
        if self._decoder.decisions is None:
            raise SpeculationError(
                "The stream keeps no decisions, since explain was False. Start it with "
                "explain=True."
            )
        return self._decoder.decisions

    @property
    def seed(self) -> int:
        """Seed of the text at a temperature above 0."""
        return self._seed

    @property
    def cached_tokens(self) -> list[int]:
        """The known tokens that the target's caches hold now, in order."""
        return self._sequence.tokens[: self.request.target.seen]

    @property
    def result(self) -> Result:
        """The generation as a whole, once it has ended.

        Raises:
            SpeculationError: it is still running.
        """
        if self._result is None:
            raise SpeculationError(
                f"The stream has yielded {len(self._yielded)} of at most "
                f"{self.max_tokens} tokens and is still running. Read it to its end, "
                "or call close() first."
            )
        return self._result

    def close(self) -> None:
        """End the text, unless it has ended; a follower ends where rank 0 does."""
        if self._result is not None or self._ending():
            return
        session = self._session
        taken_back = len(self.ready) if self._yielded_only else 0
        if session is None:
            self._close(taken_back)
        elif session.leads or not session.running:
            with session.inside():
                session.close(taken_back)
                self._close(taken_back)
        else:
            self.ready.clear()
            for _ in self:
                pass

    def _close(self, taken_back: int) -> None:
        """End here, without so many of the known tokens."""
        with DeferredSignals():
            if self._result is None:
                if taken_back:
                    settle_caches.take_back(self._decoder.rounds, taken_back)
                # Without a round the prompt is all there is, and nobody asked for it.
                self.end("closed", hold_all=self.stats.rounds > 0)

    def next_round(self, fits: Callable[[int], bool] | None = None) -> list[Chunk]:
        """Run one round, and return the chunks of all that it emitted.

        Those of a round that was begun chunk by chunk come first, without another
        round. An empty list means that the stream has ended. What a signal's handler
        raises leaves it open, before the round.

        Args:
            fits: whether the drafter may read a chunk of so many tokens of the prompt
                first; None: it reads all at once, when it is first asked.
        """
        self._decoder.fits = fits
        with DeferredSignals(checkpoints=True):
            self._advance()
            return self.take_ready()

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        count, session = len(self._yielded), self._session
        try:
            with (
                nullcontext() if session is None else session.inside(),
                DeferredSignals(checkpoints=True),
            ):
                self._advance()
                if self._result is not None:
                    raise StopIteration
                (chunk,) = self.take_ready(1)
                if session is not None:
                    session.settled()
                return chunk
        except BaseException:
            if self._result is None:  # of a signal
                if len(self._yielded) > count:  # which kept the chunk from the caller
                    self.ready.appendleft(self._yielded.pop())
                self.close()
            raise

    def _advance(self) -> None:
        """Run the next round, unless there are chunks; without a budget, no round.

        An error ends the stream, unless a signal's handler has raised it.
        """
        if self._result is not None or self.ready:
            return
        try:
            if not self._in_rounds and not (self.begin() and self._in_rounds):
                return
            if self._session is not None and self._decoder.planned:
                self._session.turn()  # else the exchange of its plan begins it
            budget = self.max_tokens - self._statistics.emitted
            self.ready.clear()
            self.reason = self._decoder.next_round(budget, self.cut)
            if self.prefixes is not None:
                self.prefixes.between_rounds()
            # With `yielded_only` at the last chunk: until then it may be taken back.
            if self.reason is not None and self._hold_all and not self._yielded_only:
                settle_caches.hold_all(self._decoder.rounds)
            if self._statistics.drafter_faults:
                self.warn_of_faults()
        except ClosedByLeaderError as closed:
            self._close(closed.taken_back)
        except Exception as error:
            if not raised_by_signal(error):
                self.end("error", hold_all=False)
            raise

    def take_ready(self, most: int | None = None) -> list[Chunk]:
        """Take the next chunks, all of the round or fewer; the last ends the stream."""
        taken: list[Chunk] = []
        for _ in range(len(self.ready) if most is None else most):
            chunk = self.ready.popleft()
            taken.append(chunk)
            self._yielded.append(chunk if chunk.logprob is None else chunk.without_row)
        if taken and self.reason is not None and not self.ready:
            self.end(self.reason)
        return taken

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        follows = self._session is not None and not self._session.leads
        if kind is not None and follows and self._result is None:
            self.end("error", hold_all=False)  # by this rank 0 knows of it
        else:
            self.close()

    def __del__(self, finalize: Callable[..., None] = finalize) -> None:
        """Leave what was entered; the prefix cache gets what was committed."""
        if self._result is None:
            finalize(self._drop)

    def _drop(self) -> None:
        self._open.close()
        if self.prefixes is not None and self._started and self._result is None:
            self.prefixes.store_dropped(self._sequence.tokens)

    # What follows is for who runs the rounds: this stream, or a batch.

    def begin(self, fits: Callable[[int], bool] | None = None) -> bool:
        """Read the prompt as far as it fits; without anything to generate, end.

        Called again, also after Ctrl-C, it reads on where it was.

        Args:
            fits: whether a chunk of so many tokens may be read now; None: all may.

        Returns:
            Whether the prompt was read to its end.
        """
        if not self._started:
            self._started = True
            interrupts.close_at_exit(self._open)
            self._open.enter_context(self._running)
            self._reuse()
        if not self._prompt_read:
            self._prompt_read = self._decoder.prefill.target(fits)
        if self._prompt_read and not self._in_rounds:
            spent = self._statistics.emitted == self.max_tokens
            if spent or self.request.complete:
                self.end("length" if spent else "stop")
            else:
                self._in_rounds = True
        return self._prompt_read

    def warn_of_faults(self) -> None:
        """Warn once that a drafter is disabled; `stats` has every one."""
        faults = self.stats.drafter_faults
        if faults and not self._warned:
            self._warned = True
            warnings.warn(str(faults[0]), DrafterFaultWarning, stacklevel=4)

    def end(self, reason: str, *, hold_all: bool = True) -> None:
        """Let the caches hold what they should, and set the result."""
        error = sys.exception() if reason == "error" else None
        if reason == "length" and self._out_of_positions:
            say_out_of_positions()
        try:
            with DeferredSignals():  # without checkpoints
                if self._hold_all and hold_all:
                    settle_caches.hold_all(self._decoder.rounds)
                if self._level_draft and reason != "error" and self._started:
                    settle_caches.level_draft(self.request)
                self._set_result(reason)
                self._leave_prefixes(reason)
        except BaseException as second:
            error = error or second
            raise
        finally:
            if self._session is not None:
                self._session.end(error)

    def _set_result(self, reason: str) -> None:
        known, rounds = self._hold_all and reason != "error", self._decoder.rounds
        logprobs = [one.logprob for one in self._yielded if one.logprob is not None]
        self.ready.clear()
        self._open.close()
        self.request.policy.end()  # learns from the stream as a whole
        self._result = Result(
            text="".join(chunk.text for chunk in self._yielded),
            tokens=[chunk.token for chunk in self._yielded],
            finish_reason=reason,
            stats=self.stats,
            seed=self._seed,
            cached_tokens=self.cached_tokens,
            next_token=settle_caches.next_token(rounds) if known else None,
            memory=self._memory(),
            logprobs=None if self.request.top is None else logprobs,
            origins=tuple(chunk.origin for chunk in self._yielded),
        )
        self.ended = True

    def _leave_prefixes(self, reason: str) -> None:
        if self.prefixes is not None and reason == "error":
            self.prefixes.forget()
        elif self.prefixes is not None and self._started:
            self.prefixes.store(self._sequence.tokens)
        if self._remember is not None and self._started and reason != "error":
            self._remember(self._sequence.tokens)

    def _reuse(self) -> None:
        """Let the lanes hold what earlier requests had in common with this one."""
        if self.prefixes is not None:
            started = time.perf_counter()
            self.prefixes.begin(self._sequence.tokens, self.stats)
            self.stats.prefill_seconds += time.perf_counter() - started

    def cut(self, outcome: RoundOutcome) -> RoundOutcome:
        """Turn a round's next tokens into chunks, up to a stop or the budget."""
        reason: str | None = None
        before = self._statistics.emitted
        for index, token in enumerate(outcome.tokens):
            text, stopped = self.text.add(token)
            complete = outcome.complete and index + 1 == len(outcome.tokens)
            spent = before + len(self.ready) + 1 == self.max_tokens
            if stopped:
                reason = "stop"
            elif complete or spent:
                rest, stopped = self.text.finish()
                reason = "stop" if complete or stopped else "length"
                text += rest
            logprob = outcome.log_probs[index] if outcome.log_probs else None
            origin = outcome.origins[index]
            self.ready.append(Chunk(text, token, reason, logprob, origin))
            if reason is not None:
                return outcome.until(index + 1, reason)
        return outcome

"""One running generation: an iterator of chunks that can be closed at any time."""

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType

from mlx_speculation.engine.detokenizer import TextDetokenizer
from mlx_speculation.engine.draft_length.base import Outcome, Plan
from mlx_speculation.engine.memory import Memory
from mlx_speculation.engine.prefix_reuse import PrefixReuse
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.engine.result import Chunk, LogProb, Result
from mlx_speculation.engine.round.decoder import Decoder
from mlx_speculation.engine.round.outcome import Cut, Emitted
from mlx_speculation.engine.round.round import Parts
from mlx_speculation.engine.stats import Statistics
from mlx_speculation.errors import DrafterFaultWarning, SpeculationError
from mlx_speculation.interrupts import DeferredSignals, raised_by_signal


class Stream:
    """Yields one `Chunk` per emitted token.

    With the caller's own `prompt_cache`: after the last chunk or `close()` it holds
    exactly `cached_tokens`. These start with the prompt and the yielded tokens, and
    exceed them by less than one round. After an error they are what was committed
    before the failing round. Ctrl-C, as whatever else a signal's handler raises, waits
    for the end of a round or of a chunk of the prompt, and closes the stream.

    Args:
        decoder: runs the rounds.
        sequence: the tokens in the caches and the prompt.
        text: turns tokens into text.
        max_tokens: how many tokens to emit at most.
        seed: what the chooser was given, for the result.
        hold_all: let the caches hold the last token too when the stream ends.
        memory: counts the bytes that are held.
        prefixes: what earlier requests left, and what this one leaves; None: nothing.
        remember: gets the known tokens at the end, unless that is an error.
        yielded_only: see `SpeculativeGenerator.stream`.
        level_draft: see there.
        running: entered at the first chunk, left at the end.
    """

    def __init__(
        self,
        *,
        decoder: Decoder,
        sequence: Sequence,
        text: TextDetokenizer,
        max_tokens: int,
        seed: int,
        hold_all: bool,
        running: AbstractContextManager[None],
        memory: Callable[[], Memory],
        prefixes: PrefixReuse | None = None,
        remember: Callable[[list[int]], None] | None = None,
        yielded_only: bool = False,
        level_draft: bool = False,
    ) -> None:
        self._decoder = decoder
        self._statistics = decoder.statistics
        self._sequence = sequence
        self._text = text
        self._max_tokens = max_tokens
        self._seed = seed
        self._hold_all = hold_all
        self._running = running
        self._memory = memory
        self._prefixes = prefixes
        self._remember = remember
        self._yielded_only = yielded_only
        self._level_draft = level_draft
        self._open = ExitStack()
        self._started = False
        self._prompt_read = False
        self._in_rounds = False
        self._warned = False
        self._reason: str | None = None
        self._ready: deque[Chunk] = deque()
        self._yielded: list[Chunk] = []
        self._result: Result | None = None

    @property
    def stats(self) -> Statistics:
        """Counts and times so far."""
        return self._statistics

    @property
    def decisions(self) -> list[tuple[Plan, Outcome]]:
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
        """What decides the text at a temperature above 0."""
        return self._seed

    @property
    def ended(self) -> bool:
        """Whether the result is there."""
        return self._result is not None

    @property
    def cached_tokens(self) -> list[int]:
        """The known tokens that the target's caches hold now, in order."""
        return self._sequence.tokens[: self._decoder.seen]

    @property
    def result(self) -> Result:
        """The generation as a whole, once it has ended.

        Raises:
            SpeculationError: it is still running.
        """
        if self._result is None:
            raise SpeculationError(
                f"The stream has yielded {len(self._yielded)} of at most "
                f"{self._max_tokens} tokens and is still running. Read it to its end, "
                "or call close() first."
            )
        return self._result

    def close(self) -> None:
        """End the generation now. The second call does nothing."""
        with DeferredSignals():
            if self._result is None:
                if self._yielded_only and self._ready:
                    self._decoder.take_back(len(self._ready))
                # Without a round the prompt is all there is, and nobody asked for it.
                self._end("closed", hold_all=self.stats.rounds > 0)

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
            if not self._has_chunk():
                return []
            return [self._next_chunk() for _ in range(len(self._ready))]

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        count = len(self._yielded)
        try:
            with DeferredSignals(checkpoints=True):
                if not self._has_chunk():
                    raise StopIteration
                return self._next_chunk()
        except StopIteration:
            raise
        except BaseException:
            if self._result is None:  # of a signal
                if len(self._yielded) > count:  # which kept the chunk from the caller
                    self._ready.appendleft(self._yielded.pop())
                self.close()
            raise

    def _has_chunk(self) -> bool:
        """Return whether there is another chunk, after a round if need be.

        An error ends the stream, unless a signal's handler has raised it.
        """
        if self._result is None and not self._ready:
            try:
                self._advance()
                if self._statistics.drafter_faults:
                    self._warn_of_faults()
            except Exception as error:
                if not raised_by_signal(error):
                    self._end("error", hold_all=False)
                raise
        return self._result is None

    def _next_chunk(self) -> Chunk:
        """Take the next chunk, which is there; the last one ends the stream."""
        chunk = self._ready.popleft()
        self._yielded.append(chunk if chunk.logprob is None else chunk.without_row)
        if self._reason is not None and not self._ready:
            self._end(self._reason)
        return chunk

    def __enter__(self) -> "Stream":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        """Leave what was entered, when the stream is dropped before its end.

        What it committed goes to the prefix cache then, as after `close()`.
        """
        with DeferredSignals():
            self._open.close()
            if self._prefixes is not None and self._started and self._result is None:
                self._prefixes.store_dropped(self._sequence.tokens)

    def begin(self, fits: Callable[[int], bool]) -> bool:
        """Read the prompt as far as it fits, for who says when the rounds are run.

        Called again, also after Ctrl-C, it reads on where it was.

        Args:
            fits: whether a chunk of so many tokens may be read now.

        Returns:
            Whether the prompt was read to its end. Without anything to generate the
            stream has ended then.

        Raises:
            Exception: whatever the model raised; the stream has ended with it.
        """
        try:
            read = self._read(fits)
            if read:
                self._begun()
            return read
        except Exception as error:
            if not raised_by_signal(error):
                self._end("error", hold_all=False)
            raise

    @property
    def parts(self) -> Parts:
        """What this stream runs rounds with."""
        return self._decoder.parts

    @property
    def budget(self) -> int:
        """How many tokens may still be emitted."""
        return self._max_tokens - self.stats.emitted

    def take(self, emitted: Emitted) -> Cut:
        """Take the tokens of a round that was run elsewhere, up to a stop.

        Count them before `chunks` is called.
        """
        self._ready.clear()
        cut = self._cut(emitted)
        self._reason = cut.reason
        return cut

    def chunks(self) -> list[Chunk]:
        """Return the chunks of the tokens that were taken; the last may end it."""
        self._warn_of_faults()
        return [self._next_chunk() for _ in range(len(self._ready))]

    @property
    def at_end(self) -> bool:
        """Whether the tokens that were taken end the stream."""
        return self._reason is not None

    @property
    def keeps_caches(self) -> bool:
        """Whether it leaves its caches to later requests."""
        return self._prefixes is not None

    def keep_prompt(self) -> None:
        """Leave what was read of the prompt to later requests already now."""
        if self._prefixes is not None:
            self._prefixes.store(self._sequence.tokens)

    def keep_nothing(self) -> None:
        """Leave nothing more to later requests."""
        if self._prefixes is not None:
            self._prefixes.forget()
            self._prefixes = None

    def fail(self) -> None:
        """End with an error that was met elsewhere."""
        if self._result is None:
            self._end("error", hold_all=False)

    def _begun(self) -> bool:
        """Read the prompt if that was not done; return whether there is a round."""
        self._read()
        if self.budget and not self._decoder.complete:
            self._in_rounds = True
            return True
        self._end("length" if self.budget == 0 else "stop")
        return False

    def _read(self, fits: Callable[[int], bool] | None = None) -> bool:
        """Read the prompt, if that was not done; return whether it is read."""
        if not self._started:
            self._started = True
            self._open.enter_context(self._running)
            self._reuse()
        if not self._prompt_read:
            self._prompt_read = self._decoder.prefill(fits)
        return self._prompt_read

    def _advance(self) -> None:
        """Run the next round; with a budget of nothing, the prompt alone."""
        if not self._in_rounds and not self._begun():
            return
        budget = self._max_tokens - self._statistics.emitted
        self._ready.clear()
        self._reason = self._decoder.next_round(budget, self._cut)
        if self._prefixes is not None:
            self._prefixes.between_rounds()
        # With `yielded_only` at the last chunk, since until then it may be taken back.
        if self._reason is not None and self._hold_all and not self._yielded_only:
            self._decoder.hold_all()

    def _warn_of_faults(self) -> None:
        """Say once that a drafter was set aside; `stats` has every one."""
        faults = self.stats.drafter_faults
        if faults and not self._warned:
            self._warned = True
            first = faults[0]
            warnings.warn(
                f"The drafter {first.drafter} is disabled, and the text goes on "
                f"without it: {first.call}() failed with {first.reason} "
                "(stats.drafter_faults has the traceback)",
                DrafterFaultWarning,
                stacklevel=4,
            )

    def _end(self, reason: str, *, hold_all: bool = True) -> None:
        """Let the caches hold what they should, and set the result."""
        with DeferredSignals():  # without checkpoints
            self._settle_caches(reason, hold_all=hold_all)
            self._set_result(reason)
            self._leave_prefixes(reason)

    def _settle_caches(self, reason: str, *, hold_all: bool) -> None:
        if self._hold_all and hold_all:
            self._decoder.hold_all()
        if self._level_draft and reason != "error" and self._started:
            self._decoder.level_draft()

    def _set_result(self, reason: str) -> None:
        known = self._hold_all and reason != "error"
        self._ready.clear()
        self._open.close()
        self._decoder.end()
        self._result = Result(
            text="".join(chunk.text for chunk in self._yielded),
            tokens=[chunk.token for chunk in self._yielded],
            finish_reason=reason,
            stats=self.stats,
            seed=self._seed,
            cached_tokens=self.cached_tokens,
            next_token=self._decoder.next_token() if known else None,
            memory=self._memory(),
            logprobs=self._logprobs(),
            origins=tuple(chunk.origin for chunk in self._yielded),
        )

    def _leave_prefixes(self, reason: str) -> None:
        if self._prefixes is not None and reason == "error":
            self._prefixes.forget()
        elif self._prefixes is not None and self._started:
            self._prefixes.store(self._sequence.tokens)
        if self._remember is not None and self._started and reason != "error":
            self._remember(self._sequence.tokens)

    def _logprobs(self) -> list[LogProb] | None:
        if not self._decoder.reports:
            return None
        return [chunk.logprob for chunk in self._yielded if chunk.logprob is not None]

    def _reuse(self) -> None:
        """Let the lanes hold what earlier requests had in common with this one."""
        if self._prefixes is not None:
            started = time.perf_counter()
            self.stats.reused = self._prefixes.begin(self._sequence.tokens)
            self.stats.prefill_seconds += time.perf_counter() - started

    def _cut(self, emitted: Emitted) -> Cut:
        """Turn a round's next tokens into chunks, up to a stop or the budget."""
        reason: str | None = None
        before = self._statistics.emitted
        for index, token in enumerate(emitted.tokens):
            text, stopped = self._text.add(token)
            complete = emitted.complete and index + 1 == len(emitted.tokens)
            spent = before + len(self._ready) + 1 == self._max_tokens
            if stopped:
                reason = "stop"
            elif complete or spent:
                rest, stopped = self._text.finish()
                reason = "stop" if complete or stopped else "length"
                text += rest
            logprob = emitted.log_probs[index] if emitted.log_probs else None
            origin = emitted.origins[index]
            self._ready.append(Chunk(text, token, reason, logprob, origin))
            if reason is not None:
                break
        return Cut(len(self._ready), reason)

"""From token ids to streamed text and chunks, with stop tokens and stop strings.

Text is given out as soon as it is certain: not while it could end in half a
character, and not while it could be the beginning of a stop string.
"""

import re
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from mlx_speculation.engine.result import Chunk
from mlx_speculation.engine.round.outcome import RoundOutcome

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
HALF = 3  # bytes of a character that is not complete, at most
CONTEXT = 8  # tokens that are decoded with new ones, at least
# Clean-up patterns begin with a space, and end at most one character after it, or at
# or after a quote.
_CLEANED = re.compile(r".*[^\s']{2}", re.DOTALL)


class StopStrings:
    """Holds text back until it is certain that no stop string begins in it.

    Attributes:
        unsaid: the text that is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self.unsaid = ""

    def add(self, text: str) -> tuple[str, bool]:
        """Take new text; return what may be shown, and whether a stop was found."""
        self.unsaid += text
        result = [i for stop in self._stops if (i := self.unsaid.find(stop)) >= 0]
        if result:
            shown, self.unsaid = self.unsaid[: min(result)], ""
            return shown, True
        keep = self._possible_start()
        split = len(self.unsaid) - keep
        shown, self.unsaid = self.unsaid[:split], self.unsaid[split:]
        return shown, False

    def flush(self) -> str:
        """Return what is still held back, at the end."""
        shown, self.unsaid = self.unsaid, ""
        return shown

    def _possible_start(self) -> int:
        """Return the length of the longest end of the text that begins a stop."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(self.unsaid)), 0, -1):
            if any(stop.startswith(self.unsaid[-length:]) for stop in self._stops):
                return length
        return 0


class TextDetokenizer:
    """Turns emitted tokens into text, and finds where the text ends.

    The text is `tokenizer.decode` of all tokens, from its first character on. Only a
    window of the last tokens is decoded for each new one. Of a run of byte tokens that
    is not valid UTF-8, and decodes to replacement characters as a whole, the characters
    that were complete remain.
    """

    def __init__(
        self,
        tokenizer: Any,  # of transformers, or mlx-lm's wrapper of one
        stop_tokens: Collection[int],  # ids that end the text and are not part of it
        stop_strings: Sequence[str],  # texts that end the text and are not part of it
    ) -> None:
        self._decode, self._cleans = _decoding(tokenizer)
        self._stop_tokens = frozenset(stop_tokens)
        self._strings = StopStrings(stop_strings) if stop_strings else None
        self._window: list[int] = []
        self._shown = ""  # text of the window that was given out
        self._whole = 0  # tokens of the window up to its last complete character
        self._cut = 0  # tokens of the window that may be dropped next

    def fork(self) -> tuple[Any, ...]:
        """Return what `restore` goes back to, after tokens that did not stay."""
        unsaid = None if self._strings is None else self._strings.unsaid
        return [*self._window], self._shown, self._whole, self._cut, unsaid

    def restore(self, fork: tuple[Any, ...]) -> None:
        """Go back to a fork; once only."""
        self._window, self._shown, self._whole, self._cut, unsaid = fork
        if self._strings is not None:
            self._strings.unsaid = unsaid

    def add(self, token: int) -> tuple[str, bool]:
        """Take one token; return the text it makes certain, and whether it ends it."""
        if token in self._stop_tokens:
            return self.finish()[0], True
        self._window.append(token)
        text = self._decode(self._window)
        end, whole = len(text), not text.endswith(INCOMPLETE)
        if not whole:
            end = max(len(text.rstrip(INCOMPLETE)), end - HALF)
        if self._cleans:
            cleaned = _CLEANED.match(text, 0, end)
            end = cleaned.end() if cleaned else 0
        new = ""
        if text.startswith(self._shown, 0, end):
            new, self._shown = text[len(self._shown) : end], text[:end]
            if whole:
                self._whole = len(self._window)
            if len(self._window) - self._cut >= (CONTEXT if whole else 2 * CONTEXT):
                self._shorten(text)
        elif whole or len(self._window) - self._whole > HALF:
            new = self._restart(whole)
        return (new, False) if self._strings is None else self._strings.add(new)

    def finish(self) -> tuple[str, bool]:
        """Return the rest of the text, and whether a stop string ended it.

        A character that is not complete is left out, and with it a replacement
        character at the very end, which looks the same.
        """
        text = self._decode(self._window) if self._window else ""
        rest = text[len(self._shown) :].rstrip(INCOMPLETE)
        if self._strings is None:
            return rest, False
        shown, stopped = self._strings.add(rest)
        return (shown, True) if stopped else (shown + self._strings.flush(), False)

    def next_texts(self, tokens: Sequence[int]) -> list[tuple[int, str]]:
        """Return the text of each of these tokens, were it the next one.

        Each comes with the number of characters between the text that was given out
        and its own. A part of a character is `INCOMPLETE`, and begins where that does.
        """
        before = self._decode(self._window) if self._window else ""
        return [self._next_text(before, token) for token in tokens]

    def _next_text(self, before: str, token: int) -> tuple[int, str]:
        after, text = self._decode([*self._window, token]), ""
        start = len(before.rstrip(INCOMPLETE))
        if after.startswith(before):
            start, text = len(before), after[len(before) :]
        start = min(start, len(after.rstrip(INCOMPLETE)))
        return max(0, start - len(self._shown)), text or self._decode([token])

    def _restart(self, whole: bool) -> str:
        """Decode the tokens after the last complete character by themselves.

        The new ones have changed the text of those before, which was given out.
        """
        passed, self._window = self._whole, self._window[self._whole :]
        text = self._decode(self._window)
        self._shown = text[: max(len(text.rstrip(INCOMPLETE)), len(text) - HALF)]
        self._whole, self._cut = len(self._window) if whole else 0, 0
        return self._shown if passed else ""

    def _shorten(self, text: str) -> None:
        """Drop the first tokens, where the others decode to the end of the text."""
        kept = self._window[self._cut :]
        part = self._decode(kept) if self._cut else ""
        certain = len(part) - (len(text) - len(self._shown))
        # Without text there is no first character for a decoder to strip again, and
        # without two none for a space to be removed from between.
        if certain > (1 if self._cleans else 0) and text.endswith(part):
            self._whole = max(0, self._whole - self._cut)
            self._window, self._shown = kept, part[:certain]
        self._cut = len(self._window)


class ChunkQueue:
    """The chunks of one generation: made by the cut of each round, taken one by one.

    Attributes:
        text: turns tokens into text.
        max_tokens: how many tokens are emitted at most.
        ready: chunks that were not taken yet.
        taken: those that were, without log-probabilities of all ids.
        reason: why the text ends with the last one; None: it goes on.
    """

    def __init__(self, text: TextDetokenizer, max_tokens: int) -> None:
        self.text, self.max_tokens = text, max_tokens
        self.ready: deque[Chunk] = deque()
        self.taken: list[Chunk] = []
        self.reason: str | None = None
        self._before: Any = None  # the text before the first cut of a round

    def cut(self, outcome: RoundOutcome) -> RoundOutcome:
        """Turn a round's tokens into chunks, up to a stop or the budget."""
        reason: str | None = None
        if self._before is None:
            self._before = self.text.fork()
        before = len(self.taken)
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

    def take(self, most: int | None = None) -> list[Chunk]:
        """Take the next chunks: all that are ready, or at most so many."""
        result: list[Chunk] = []
        self._before = None
        for _ in range(len(self.ready) if most is None else most):
            chunk = self.ready.popleft()
            result.append(chunk)
            self.taken.append(chunk if chunk.logprob is None else chunk.without_row)
        return result

    def undo(self) -> None:
        """Go back to the state before the cuts of a round whose chunks stay here."""
        if self._before is not None:
            self.ready.clear()
            self.text.restore(self._before)
            self._before = None

    def put_back(self) -> None:
        """Make the last chunk that was taken the next one again."""
        self.ready.appendleft(self.taken.pop())


def _decoding(tokenizer: Any) -> tuple[Callable[[list[int]], str], bool]:
    """Return the decoding of a tokenizer, and whether it removes spaces again.

    transformers does so where the tokenizer is configured to, but not for BPE, of which
    it would log a warning in the middle of the text.
    """
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return tokenizer.decode, False
    backend = getattr(tokenizer, "backend_tokenizer", None)
    forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    if type(getattr(backend, "model", None)).__name__ != "BPE" or getattr(
        tokenizer, forced, False
    ):
        return tokenizer.decode, True
    return partial(tokenizer.decode, clean_up_tokenization_spaces=False), False

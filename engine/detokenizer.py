"""Detokenizer: streamed text and chunks from token ids, up to a stop.

Text is emitted as soon as it is certain. An incomplete character at the end is held
back, and so are last characters with which a stop string may begin.
"""

import re
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mlx_speculation.engine.result import Chunk
from mlx_speculation.engine.round.outcome import RoundOutcome

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
HALF = 3  # largest number of bytes of an incomplete character
CONTEXT = 8  # smallest number of earlier tokens that are decoded with a new one
# Matches text that a tokenizer's clean-up of spaces cannot change any more. Each text
# that the clean-up replaces, such as " n't" or " 've", begins with a space. As long as
# such a text is incomplete, one of its last two characters is a space or a quote.
_CLEANED = re.compile(r".*[^\s']{2}", re.DOTALL)


class StopStrings:
    """Holds text back in `unsaid` until no stop string can begin in it."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.unsaid = ""

    def add(self, text: str) -> tuple[str, bool]:
        """Add text; return the text that may be shown, and whether a stop was found."""
        self.unsaid += text
        result = [i for stop in self.stops if (i := self.unsaid.find(stop)) >= 0]
        if result:
            shown, self.unsaid = self.unsaid[: min(result)], ""
            return shown, True
        # Find the longest suffix of the text that is a prefix of a stop string.
        longest = max((len(stop) - 1 for stop in self.stops), default=0)
        split = max(0, len(self.unsaid) - longest)
        while split < len(self.unsaid):
            if any(stop.startswith(self.unsaid[split:]) for stop in self.stops):
                break
            split += 1
        shown, self.unsaid = self.unsaid[:split], self.unsaid[split:]
        return shown, False

    def flush(self) -> str:
        """Return the held-back text."""
        shown, self.unsaid = self.unsaid, ""
        return shown


class TextDetokenizer:
    """Turns emitted tokens into text, and finds where the text ends.

    The text equals `tokenizer.decode` of all tokens, though only a window of the last
    tokens is decoded for each new one. One case differs: a run of byte tokens may turn
    out to be invalid UTF-8. The tokenizer then decodes the whole run to replacement
    characters, but characters of the run that were already emitted stay.
    """

    def __init__(
        self,
        tokenizer: Any,  # of transformers, or mlx-lm's wrapper of one
        stop_tokens: Collection[int],  # end the text and are not part of it
        stop_strings: Sequence[str],  # end the text and are not part of it
    ) -> None:
        self._decode, self._cleans = _decoding(tokenizer)
        self._stop_tokens = frozenset(stop_tokens)
        self._strings = StopStrings(stop_strings)
        self._window: list[int] = []
        self._shown = ""  # emitted text of the window
        self._whole = 0  # number of the window's tokens up to the last whole character
        self._cut = 0  # number of tokens to drop next from the window's beginning

    def fork(self) -> tuple[Any, ...]:
        """Return the state, to `restore` it if the next tokens are undone."""
        unsaid = self._strings.unsaid
        return [*self._window], self._shown, self._whole, self._cut, unsaid

    def restore(self, fork: tuple[Any, ...]) -> None:
        """Restore a state that `fork` has returned, at most once per state."""
        self._window, self._shown, self._whole, self._cut, self._strings.unsaid = fork

    def add(self, token: int) -> tuple[str, bool]:
        """Add a token; return the newly certain text, and whether the text ends."""
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
        return self._strings.add(new) if self._strings.stops else (new, False)

    def finish(self) -> tuple[str, bool]:
        """Return the rest of the text, and whether a stop string ended it.

        An incomplete character at the end is left out. A replacement character at the
        end is left out too, even if it is part of the text.
        """
        text = self._decode(self._window) if self._window else ""
        rest = text[len(self._shown) :].rstrip(INCOMPLETE)
        shown, stopped = self._strings.add(rest)
        return (shown, True) if stopped else (shown + self._strings.flush(), False)

    def next_texts(self, tokens: Sequence[int]) -> list[tuple[int, str]]:
        """Return the text that each of these tokens would add as the next token.

        Each text comes with its offset, counted in characters from the end of the
        emitted text. For a part of a character, the text is `INCOMPLETE`, and the
        offset is that of the character.
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
        """Decode the tokens after the last complete character by themselves."""
        # The tokens have changed the text of earlier tokens, which is already emitted.
        passed, self._window = self._whole, self._window[self._whole :]
        text = self._decode(self._window)
        self._shown = text[: max(len(text.rstrip(INCOMPLETE)), len(text) - HALF)]
        self._whole, self._cut = len(self._window) if whole else 0, 0
        return self._shown if passed else ""

    def _shorten(self, text: str) -> None:
        """Drop the window's first tokens if the rest decodes to a suffix of `text`."""
        kept = self._window[self._cut :]
        part = self._decode(kept) if self._cut else ""
        certain = len(part) - (len(text) - len(self._shown))
        # An emitted character has to stay in the window: decoders strip a space at the
        # start of a text. With clean-up, two have to: `_CLEANED` matches at least two.
        if certain > (1 if self._cleans else 0) and text.endswith(part):
            self._whole = max(0, self._whole - self._cut)
            self._window, self._shown = kept, part[:certain]
        self._cut = len(self._window)


@dataclass(eq=False)
class ChunkQueue:
    """The chunks of one generation: `cut` makes them, `take` hands them out."""

    text: TextDetokenizer
    max_tokens: int
    ready: deque[Chunk] = field(default_factory=deque)  # not taken yet
    # All taken chunks, without the log-probabilities of all ids, which are large
    taken: list[Chunk] = field(default_factory=list)
    reason: str | None = None  # why the text ends; None: it goes on
    _before: Any = None  # the state of `text` before the first cut after a `take`

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
        """Take all ready chunks, or the next `most`."""
        result: list[Chunk] = []
        self._before = None
        for _ in range(len(self.ready) if most is None else most):
            chunk = self.ready.popleft()
            result.append(chunk)
            self.taken.append(chunk if chunk.logprob is None else chunk.without_row)
        return result

    def undo(self) -> None:
        """Undo the cuts of a round that failed before its chunks were taken."""
        if self._before is not None:
            self.ready.clear()
            self.text.restore(self._before)
            self._before = None

    def put_back(self) -> None:
        """Put the last taken chunk back in front of the ready ones."""
        self.ready.appendleft(self.taken.pop())


def _decoding(tokenizer: Any) -> tuple[Callable[[list[int]], str], bool]:
    """Return the decode function of a tokenizer, and whether it cleans up spaces."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return tokenizer.decode, False
    backend = getattr(tokenizer, "backend_tokenizer", None)
    forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    if type(getattr(backend, "model", None)).__name__ != "BPE" or getattr(
        tokenizer, forced, False
    ):
        return tokenizer.decode, True
    # transformers does not clean up for BPE, but would log a warning.
    return partial(tokenizer.decode, clean_up_tokenization_spaces=False), False

"""From token ids to streamed text, with stop tokens and stop strings.

Text is given out as soon as it is certain: not while it could end in half a
character, and not while it could be the beginning of a stop string.
"""

from collections.abc import Collection, Sequence
from typing import Any

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class StopStrings:
    """Holds text back until it is certain that no stop string begins in it."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def add(self, text: str) -> tuple[str, bool]:
        """Take new text; return what may be shown, and whether a stop was found."""
        self._held += text
        found = [i for stop in self._stops if (i := self._held.find(stop)) >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            return shown, True
        keep = self._possible_start()
        split = len(self._held) - keep
        shown, self._held = self._held[:split], self._held[split:]
        return shown, False

    def flush(self) -> str:
        """Return what is still held back, at the end."""
        shown, self._held = self._held, ""
        return shown

    def _possible_start(self) -> int:
        """Return the length of the longest end of the text that begins a stop."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0


class TextDetokenizer:
    """Turns emitted tokens into text, and finds where the text ends."""

    def __init__(
        self,
        detokenizer: Any,  # a streaming detokenizer of mlx-lm, fresh
        stop_tokens: Collection[int],  # ids that end the text and are not part of it
        stop_strings: Sequence[str],  # texts that end the text and are not part of it
    ) -> None:
        self._detokenizer = detokenizer
        self._stop_tokens = frozenset(stop_tokens)
        self._strings = StopStrings(stop_strings) if stop_strings else None

    def add(self, token: int) -> tuple[str, bool]:
        """Take one token; return the text it makes certain, and whether it ends it."""
        if token in self._stop_tokens:
            return self.finish()[0], True
        self._detokenizer.add_token(token)
        text = self._detokenizer.last_segment
        return (text, False) if self._strings is None else self._strings.add(text)

    def finish(self) -> tuple[str, bool]:
        """Return the rest of the text, and whether a stop string ended it.

        A character that is not complete is left out, and with it a replacement
        character at the very end, which looks the same.
        """
        self._detokenizer.finalize()
        rest = self._detokenizer.last_segment.rstrip(INCOMPLETE)
        if self._strings is None:
            return rest, False
        shown, stopped = self._strings.add(rest)
        return (shown, True) if stopped else (shown + self._strings.flush(), False)

"""The tokens of one request: its encoded prompt, and the known tokens so far."""

import operator
import warnings
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, TypeGuard

import mlx.core as mx
import numpy as np

from mlx_speculation.caches import (
    PrefixCache,
    check_single,
    check_supported,
    position,
)
from mlx_speculation.errors import ContextLengthNotice, InvalidRequestError
from mlx_speculation.models.vision import ImagePrompt
from mlx_speculation.samplers import Rows

# Tokens before an answer that are decoded with it, so that a space at its start is kept
CONTEXT = 8
MOST = 64  # largest number of answers that are compared at one place of a prompt

# Text, token ids, the messages of a chat, or an image processor's output.
Prompt = str | SequenceOf[int] | SequenceOf[Mapping[str, Any]] | ImagePrompt


@dataclass(slots=True)
class Sequence:
    """The known tokens: `cached_tokens` if passed, the prompt, and the emitted ones."""

    tokens: list[int]
    # Tokens in a passed prompt cache whose ids are unknown; they precede `tokens`
    start: int = 0
    # Runs of tokens that stand for images, each as [start, stop)
    images: tuple[tuple[int, int], ...] = ()
    prediction: SequenceOf[int] = ()  # an expected answer, which lookups search

    def rows(self, ahead: mx.array | None = None, count: int = 1) -> Rows:
        """Return the last `count` prefixes of known tokens and `ahead`; see `Rows`."""
        return Rows(self.tokens, ahead, count, self.start)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Encodes and checks the prompts for one target."""

    tokenizer: Any  # the target's, in mlx-lm's wrapper
    highest_id: int  # the largest token id of the target
    trained_length: int | None = None  # context length in training; None: unknown
    positions: int | None = None  # size of the table of positions; None: no table
    # Replaces the ids of earlier answers in a prompt, see `replayed`
    replay: Callable[[list[int]], list[int]] = list

    @property
    def context_length(self) -> int | None:
        """The smaller one of `trained_length` and `positions`."""
        lengths = [n for n in (self.trained_length, self.positions) if n is not None]
        return min(lengths, default=None)

    def fitting(self, sequence: Sequence, max_tokens: int) -> int:
        """Return how many of `max_tokens` fit into the target's table of positions.

        Raises:
            InvalidRequestError: the prompt alone does not fit.
        """
        if self.positions is None:
            return max_tokens
        count = sequence.start + len(sequence.tokens)
        if count > self.positions:
            raise InvalidRequestError(
                f"The prompt has {count} tokens, but the model has only "
                f"{self.positions} positions. Shorten the prompt."
            )
        return min(max_tokens, self.positions - count)

    def sequence(
        self,
        prompt: Prompt,
        prompt_cache: list[Any] | None,
        cached_tokens: Iterable[int] | None,
    ) -> tuple[Sequence, int]:
        """Return the known tokens, and how many of them the caches hold."""
        known = None if cached_tokens is None else self._checked_ids(cached_tokens)
        tokens = self.encode(prompt)
        self._warn_if_long(len(tokens) + len(known or ()))
        if prompt_cache is None:
            if isinstance(prompt, str) or _has_messages(prompt):
                tokens = self.replay(tokens)
            if known:
                raise InvalidRequestError(
                    f"cached_tokens names {len(known)} tokens, and prompt_cache is "
                    "None. Pass the caches that hold them."
                )
            return Sequence(tokens), 0
        check_supported(prompt_cache)
        check_single(prompt_cache)
        cached = position(prompt_cache)
        if known is None:
            return Sequence(tokens, start=cached or 0), 0
        if cached is not None and cached != len(known):
            raise InvalidRequestError(
                f"prompt_cache holds {cached} tokens and cached_tokens names "
                f"{len(known)}. Pass the tokens that the caches were fed."
            )
        return Sequence(known + tokens), len(known)

    def encode(self, prompt: Prompt | Iterable[int]) -> list[int]:
        """Encode text as mlx-lm does, and messages by the chat template; check ids.

        A beginning-of-text token is added only if the text does not begin with one. A
        chat template adds its own.
        """
        ids: Any = prompt
        if isinstance(prompt, Mapping):
            raise InvalidRequestError(
                f"The prompt is a dictionary, {prompt!r}. Pass a conversation as a "
                "list of messages, and several conversations as a list of such lists."
            )
        if isinstance(prompt, str):
            bos = self.tokenizer.bos_token
            special = bos is None or not prompt.startswith(bos)
            ids = self.tokenizer.encode(prompt, add_special_tokens=special)
        elif _has_messages(prompt):
            text = self._render(prompt)
            ids = self.tokenizer.encode(text, add_special_tokens=False)
        tokens = self._checked_ids(ids)
        if not tokens:
            raise InvalidRequestError(
                "The prompt has 0 tokens, and at least 1 is needed. Pass some text."
            )
        return tokens

    def prediction(self, expected: str | Iterable[int]) -> list[int]:
        """Encode an expected answer, which may be empty, and check its ids."""
        ids: Any = expected
        if isinstance(expected, str):
            ids = self.tokenizer.encode(expected, add_special_tokens=False)
        return self._checked_ids(ids)

    def _render(self, messages: SequenceOf[Any]) -> str:
        """Render a conversation up to the beginning of the answer."""
        for each in messages:
            if not isinstance(each, Mapping) or "role" not in each:
                raise InvalidRequestError(
                    f"One of {len(messages)} messages is {each!r}. Each must be a "
                    "dictionary with a role and a content."
                )
        if not self.tokenizer.has_chat_template:
            raise InvalidRequestError(
                f"The prompt is {len(messages)} messages, and the tokenizer has no "
                "chat template. Pass a text, or take an instruct model."
            )
        conversation = [{**each, **_as_text(each)} for each in messages]
        try:
            text: str = self.tokenizer.apply_chat_template(
                conversation,
                tokenize=False,
                add_generation_prompt=True,
            )
        except Exception as error:  # a template can raise any error
            raise InvalidRequestError(
                f"The chat template refused {len(messages)} messages: "
                f"{type(error).__name__}: {error}."
            ) from error
        return text

    def _warn_if_long(self, count: int) -> None:
        if self.positions is not None:
            return  # `fitting` refuses a longer prompt
        if self.context_length is not None and count > self.context_length:
            warnings.warn(
                f"The prompt has {count} tokens, but the model was made for at most "
                f"{self.context_length}, by its config: the text may be nonsense. "
                "Shorten the prompt, or scale the rotary embeddings.",
                ContextLengthNotice,
                stacklevel=5,
            )

    def _checked_ids(self, ids: Iterable[int]) -> list[int]:
        """Return the ids as plain integers; refuse ids that the target lacks."""
        plain = ids.tolist() if isinstance(ids, mx.array | np.ndarray) else ids
        try:
            tokens = [operator.index(token) for token in plain]
        except TypeError as error:
            raise InvalidRequestError(
                f"Token ids must be whole numbers in one dimension, not {ids!r}."
            ) from error
        wrong = next((t for t in tokens if not 0 <= t <= self.highest_id), None)
        if wrong is not None:
            raise InvalidRequestError(
                f"A token id is {wrong}, but the target's ids go from 0 to "
                f"{self.highest_id}. Encode the text with the target's tokenizer."
            )
        return tokens


def _as_text(message: Mapping[str, Any]) -> dict[str, str]:
    """Return a content of several parts as one text, as mlx-lm's server does."""
    parts = message.get("content")
    if isinstance(parts, str) or not isinstance(parts, SequenceOf):
        return {}
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str) or part.get("type", "text") != "text":
            raise InvalidRequestError(
                f"A message has the part {part!r}, but only text parts are read. Pass "
                "images by images=, to a model that was loaded with vision=True."
            )
    return {"content": "".join(part["text"] for part in parts)}


def _has_messages(prompt: Any) -> TypeGuard[SequenceOf[Any]]:
    return isinstance(prompt, SequenceOf) and any(
        isinstance(each, Mapping) for each in prompt
    )


def replayed(cache: PrefixCache, tokenizer: Any, ids: SequenceOf[int]) -> list[int]:
    """Return a prompt in which earlier answers have the ids that were generated.

    A later prompt contains an answer as text, and the tokenizer may encode that text to
    ids other than the generated ones:

        generated      [The][ answer][ is][ 4][2]     in the prefix cache
        the prompt     [The][ answer][ is][ 42]       the same text, encoded again

    The ids of a cached answer replace ids of the prompt only if all ids before them are
    equal, and the texts of both are equal character by character. So nothing can get
    into the text of the prompt from another conversation.
    """
    prompt, done = list(ids), -1
    while True:
        start, answers = cache.answers(prompt)
        if start <= done or not answers:
            return prompt
        done, first = start, max(0, start - CONTEXT)
        rest = _text(tokenizer, prompt[first:])
        for answer in answers[:MOST]:
            text = _text(tokenizer, [*prompt[first:start], *answer])
            stop = _end(tokenizer, prompt, first, text) if rest.startswith(text) else 0
            if start < stop and prompt[start:stop] != answer:
                prompt[start:stop] = answer
                break


def _end(tokenizer: Any, prompt: SequenceOf[int], first: int, text: str) -> int:
    """Return the end of the tokens, from `first` on, that decode to `text`, else 0."""
    low, high = first, min(len(prompt), first + CONTEXT + 4 * len(text))
    while low < high:  # bisection: more tokens never have a shorter text
        middle = (low + high) // 2
        if len(_text(tokenizer, prompt[first:middle])) < len(text):
            low = middle + 1
        else:
            high = middle
    return low if _text(tokenizer, prompt[first:low]) == text else 0


def _text(tokenizer: Any, ids: SequenceOf[int]) -> str:
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

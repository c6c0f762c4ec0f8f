"""Exact replay: what the target wrote comes back in the ids in which it wrote it.

A later prompt has an answer as text, and a tokenizer may make other ids of that than
the target chose:

    written        [The][ answer][ is][ 4][2]     what the prefix cache holds
    the prompt     [The][ answer][ is][ 42]       the same text, read again from here on

So an answer in the prefix cache takes the place of the ids of a prompt where all ids
before it are the same, and both are the same text, character for character. Nothing
that the prompt does not say comes in, such as the thinking of another conversation.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mlx_speculation.caches import PrefixCache

CONTEXT = 8  # tokens before an answer that are decoded with it: a first space counts
MOST = 64  # answers to one prompt that are compared


def replay_of(
    cache: PrefixCache | None, tokenizer: Any
) -> Callable[[list[int]], list[int]]:
    """Return what replays the answers that a cache holds; None holds none."""
    return list if cache is None else partial(replayed, cache, tokenizer)


def replayed(cache: PrefixCache, tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """Return a prompt whose answers have the ids in which they were written."""
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


def _end(tokenizer: Any, prompt: Sequence[int], first: int, text: str) -> int:
    """Return where a text ends that the tokens from `first` begin with.

    0: in the middle of a token.
    """
    low, high = first, min(len(prompt), first + CONTEXT + 4 * len(text))
    while low < high:  # more tokens never have less text
        middle = (low + high) // 2
        if len(_text(tokenizer, prompt[first:middle])) < len(text):
            low = middle + 1
        else:
            high = middle
    return low if _text(tokenizer, prompt[first:low]) == text else 0


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

"""Prompts that a target writes itself (Magpie, arXiv 2406.08464).

A chat model reads its template up to the user's text, and perhaps the first words of a
request. It continues with text like that of users in its training data.
"""

import random
from typing import Any

import mlx.nn as nn

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.training.data.answers import end_ids, write_answers

_MARK = "\u241fuser\u241f"
_SHORTEST = 4  # the minimum number of tokens of a user's text
_WORD_BY_WORD = 0.02  # `min_p`: less likely tokens would make nonsense
# First words of requests, of many kinds: a draft learns only kinds that it has seen.
SEEDS = (
    "",
    "",
    "",
    "Explain",
    "What is the difference between",
    "How do I",
    "Why does",
    "Can you",
    "Write a Python function that",
    "Write a SQL query that",
    "Fix the bug in this code:\n",
    "Write a short story about",
    "Write a poem about",
    "Write an email to",
    "Write a product description for",
    "Write a blog post about",
    "Write a persuasive essay on",
    "Imagine you are",
    "Pretend that you are",
    "Suggest",
    "Give me a list of",
    "List five",
    "Compare",
    "Describe",
    "Summarize the following text:\n",
    "Summarize this article in three sentences:\n",
    "Rewrite this paragraph so that it is shorter:\n",
    "Edit the following paragraph for grammar:\n",
    "Translate the following sentence into English:\n",
    "Translate German to English:",
    "Translate the following into French:\n",
    "Answer the question with the help of this text:\n",
    "Based on the passage below, answer:\n",
    "Extract the names and dates from this text:\n",
    "Classify the sentiment of this review:\n",
    "who wrote the",
    "who is the",
    "when did the",
    "where is the",
    "how many",
    "what is the name of",
    "A train leaves",
    "If a store sells",
    "Tom has 5 apples and",
    "There are 24 students in a class.",
    "Lisa bought",
    "The sum of two numbers is",
    "Solve for x:",
    "What is the probability that",
    "Plan a",
    "Give me a recipe for",
    "What are the benefits of",
    "Act as a",
    "Convert the following to JSON:\n",
)


def frame_of(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the tokens of a chat template before and after a user's text.

    Without a template, the first list has the tokens that begin any text, and the
    second is empty.

    Raises:
        InvalidRequestError: the template does not repeat the text unchanged.
    """
    if not getattr(tokenizer, "has_chat_template", False):
        return list(tokenizer.encode("")) or end_ids(tokenizer)[:1], []
    whole = tokenizer.apply_chat_template(
        [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=True
    )
    before, mark, after = whole.partition(_MARK)
    if not mark:
        raise InvalidRequestError(
            "The chat template does not repeat a user's text as it is, so the target "
            "cannot write prompts itself. Pass a file of prompts."
        )
    first, last = (
        list(tokenizer.encode(part, add_special_tokens=False))
        for part in (before, after)
    )
    return first, last


def write_prompts(
    model: nn.Module, tokenizer: Any, count: int, *, most: int, seed: int
) -> list[list[int]]:
    """Return prompts that end where an answer begins, as token ids.

    Very short and repeated prompts are left out, so there can be fewer than `count`.
    The target adds at most `most` tokens to the given first words of a user's text.

    Raises:
        InvalidRequestError: the tokenizer has no token that could begin a prompt.
    """
    (before, after), draw = frame_of(tokenizer), random.Random(seed)
    beginnings = [
        tokenizer.encode(draw.choice(SEEDS), add_special_tokens=False)
        for _ in range(count)
    ]
    starts = [[*before, *words] for words in beginnings]
    if not all(starts):
        raise InvalidRequestError(
            "The tokenizer has neither a chat template nor a token that begins a text, "
            "so the target cannot write prompts itself. Pass a file of prompts."
        )
    ends = sorted({*end_ids(tokenizer), *after[:1]})
    written = write_answers(
        model,
        starts,
        most=most,
        temperature=1.0,
        ends=ends,
        seed=seed,
        min_p=_WORD_BY_WORD,
    )
    result: dict[tuple[int, ...], None] = {}
    for words, more in zip(beginnings, written, strict=True):
        # Only the last token can be an end.
        text = [*words, *(token for token in more if token not in ends)]
        if len(text) >= _SHORTEST:
            result[(*before, *text, *after)] = None
    return [list(each) for each in result]

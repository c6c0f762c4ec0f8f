"""Comparison of verification in one forward with verification in single steps.

In each row, a forward over k + 1 tokens has to choose the same token as k + 1 forwards
over one token. This module runs both on the same caches, without changing them, and
compares the logits row by row:

    text        the model's greedy continuation of a prompt
    draft       the next k tokens of the text, one of them replaced by a wrong one
    rows        k + 1: one after the last token before the draft, one after each of the
                drafted tokens

Rows after the wrong token are compared too, since both ways read the same tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_speculation.caches import Speculation
from mlx_speculation.errors import InvalidRequestError, NonFiniteLogitsError
from mlx_speculation.models import Lane, Sliding, check_positions, logit_width


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a draft, verified both ways."""

    index: int  # row 0 follows the last token before the draft
    at_once: int  # the token that the forward over k + 1 tokens chooses
    one_by_one: int  # the token that the forward over one token chooses
    margin: float  # best logit minus second best, in the forward over one token
    difference: float  # the largest difference of a logit between the two ways

    @property
    def differs(self) -> bool:
        """Return whether the two ways choose different tokens."""
        return self.at_once != self.one_by_one


@dataclass(frozen=True, slots=True)
class Place:
    """One draft: its position in the text, its tokens and its rows."""

    position: int  # the number of generated tokens before the draft
    draft: tuple[int, ...]  # k tokens, one of which is wrong
    wrong: int  # the index of the wrong token in the draft
    rows: tuple[Row, ...]  # k + 1

    @property
    def difference(self) -> float:
        """The largest difference of a logit in all rows."""
        return max(row.difference for row in self.rows)


def verify_both_ways(
    model: nn.Module,
    prompt: Sequence[int],  # token ids, at least one
    text: Sequence[int],  # the greedy continuation, at least `draft_length` tokens
    *,
    draft_length: int,  # k, at least 1
    places: int,  # how many drafts, at least 1; fewer if the text is short
    seed: int,  # draws the wrong token of each draft and its index
    sliding: Sliding = "native",
) -> Iterator[Place]:
    """Yield comparisons at places that are evenly spread over the text.

    The text between places is fed by turns in forwards over k + 1 tokens and over one
    token. The two ways leave the keys of a ring cache in different orders.

    Raises:
        InvalidRequestError: the text has fewer tokens than a draft, the prompt is
            empty, or a number is below 1.
        NonFiniteLogitsError: a row holds NaN.
    """
    room = len(text) - draft_length
    if not prompt or draft_length < 1 or places < 1 or room < 0:
        raise InvalidRequestError(
            f"The prompt has {len(prompt)} tokens, the text {len(text)}, each draft "
            f"{draft_length}, and there are {places} places. Each number must be at "
            "least 1, and the text must not be shorter than a draft."
        )
    random = np.random.default_rng(seed)
    vocab, tokens = logit_width(model), [*prompt, *text]
    lane = Lane(model, sliding=sliding)
    check_positions(len(tokens), 0, lane.positions)
    lane.feed(prompt[:-1])
    spread = {round(i * room / max(places - 1, 1)) for i in range(places)}
    for number, position in enumerate(sorted(spread)):
        stop = len(prompt) + position - 1
        lane.feed(tokens[lane.seen : stop], step=1 if number % 2 else draft_length + 1)
        fed = tokens[stop : stop + draft_length + 1]
        wrong = int(random.integers(draft_length))
        shift = 1 + int(random.integers(vocab - 1))
        fed[wrong + 1] = (fed[wrong + 1] + shift) % vocab
        rows = compare_rows(logit_rows(lane, fed, len(fed)), logit_rows(lane, fed, 1))
        yield Place(position, tuple(fed[1:]), wrong, rows)


def logit_rows(lane: Lane, tokens: Sequence[int], width: int) -> Any:
    """Return the logits after each of `tokens`, from forwards over `width` tokens.

    The result is float32 numpy [rows, vocab]. The caches of the lane do not change.
    """
    rows = []
    with Speculation(lane.caches, whole=True, isolated=True) as speculation:
        for start in range(0, len(tokens), width):
            ids = mx.array(list(tokens[start : start + width]))
            logits = lane.model(ids[None], cache=speculation.caches)[0]
            rows.append(np.array(logits.astype(mx.float32)))
    return np.concatenate(rows)


def compare_rows(at_once: Any, one_by_one: Any) -> tuple[Row, ...]:
    """Compare two arrays of logits [rows, vocab]; NaN raises NonFiniteLogitsError."""
    result = []
    for index, (wide, single) in enumerate(zip(at_once, one_by_one, strict=True)):
        for name, row in (("at once", wide), ("one by one", single)):
            if missing := int(np.isnan(row).sum()):
                raise NonFiniteLogitsError(
                    f"Row {index} of a draft verified {name} holds {missing} NaN in "
                    f"{row.size} logits. No token can be chosen from it: check the "
                    "model's weights."
                )
        second, first = np.partition(single, -2)[-2:]
        with np.errstate(invalid="ignore"):  # -inf minus -inf counts as 0
            difference = np.where(wide == single, 0.0, np.abs(wide - single)).max()
        choices = int(wide.argmax()), int(single.argmax())
        result.append(Row(index, *choices, float(first - second), float(difference)))
    return tuple(result)

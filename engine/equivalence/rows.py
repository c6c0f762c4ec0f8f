"""The same drafts verified at once and one by one, from the very same caches.

A round of speculation rests on one claim: a forward over k + 1 tokens chooses in each
row what k + 1 forwards over one token would. Here both are run from one state of the
live caches, in isolated speculations that write nothing live, and compared row by row:

    text        the model's own greedy continuation of a prompt
    draft       the next k tokens of the text, one of them replaced by a wrong one
    rows        of the last token before the draft and of each draft: k + 1

Rows after the wrong token count too, since both ways are fed the same tokens. This
module knows no text and no tokenizer; where two texts part is
`engine.equivalence.texts`'s.
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

    index: int  # of the row, from 0: after the last token before the draft
    at_once: int  # the token that the one forward chooses
    one_by_one: int  # the token that forwards over one token choose
    # How much better that one's logit is than the second best, one by one
    margin: float
    difference: float  # the largest between the two ways, of any logit

    @property
    def differs(self) -> bool:
        """Return whether the choices do."""
        return self.at_once != self.one_by_one


@dataclass(frozen=True, slots=True)
class Place:
    """One draft: where it stands in the text, its tokens, and its rows."""

    position: int  # tokens of the text before the draft, the prompt not counted
    draft: tuple[int, ...]  # the k tokens, with one that is wrong
    wrong: int  # the index of that one in the draft
    rows: tuple[Row, ...]  # k + 1

    @property
    def difference(self) -> float:
        """The largest of all rows."""
        return max(row.difference for row in self.rows)


def greedy_text(model: nn.Module, prompt: Sequence[int], tokens: int) -> list[int]:
    """Decode greedily, one token a forward; end-of-text tokens do not end it."""
    lane = Lane(model)
    lane.feed(prompt[:-1])
    last, text = prompt[-1], []
    for _ in range(tokens):
        with lane.begin(whole=True) as lane_round:
            choice: Any = mx.argmax(lane_round.forward(mx.array([last]))[-1]).item()
            last = int(choice)
            lane_round.commit(1)
        text.append(last)
    return text


def verify_both_ways(
    model: nn.Module,  # an mlx-lm model
    prompt: Sequence[int],  # token ids, at least one
    # What follows, see `greedy_text`; at least `draft_length` tokens
    text: Sequence[int],
    *,
    draft_length: int,  # k, from 1
    places: int,  # how many drafts, from 1; fewer where the text has no room for them
    seed: int,  # for the wrong token of each draft, and its index
    sliding: Sliding = "native",  # the caches in place of rings, see `Lane`
) -> Iterator[Place]:
    """Yield the comparison at each of some places, evenly spread over the text.

    Every other place is reached by forwards over one token, the rest by forwards over
    k + 1, since a ring that was filled in another way is read in another order.

    Raises:
        InvalidRequestError: the text is too short.
        NonFiniteLogitsError: a row holds NaN.
    """
    room = len(text) - draft_length
    if not prompt or draft_length < 1 or places < 1 or room < 0:
        raise InvalidRequestError(
            f"A prompt of {len(prompt)} tokens, a text of {len(text)}, drafts of "
            f"{draft_length} and {places} places were given. Each is 1 or more, and "
            "the text not shorter than a draft."
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
    """Return the logits after each of `tokens`, float32 numpy [rows, vocab].

    The lane's caches stay as they are.
    """
    rows = []
    with Speculation(lane.caches, whole=True, isolated=True) as speculation:
        for start in range(0, len(tokens), width):
            ids = mx.array(list(tokens[start : start + width]))
            logits = lane.model(ids[None], cache=speculation.caches)[0]
            rows.append(np.array(logits.astype(mx.float32)))
    return np.concatenate(rows)


def compare_rows(at_once: Any, one_by_one: Any) -> tuple[Row, ...]:
    """Compare two arrays of logits [rows, vocab], row by row.

    Raises:
        NonFiniteLogitsError: a row holds NaN.
    """
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
        with np.errstate(invalid="ignore"):  # minus infinity twice is no difference
            difference = np.where(wide == single, 0.0, np.abs(wide - single)).max()
        choices = int(wide.argmax()), int(single.argmax())
        result.append(Row(index, *choices, float(first - second), float(difference)))
    return tuple(result)

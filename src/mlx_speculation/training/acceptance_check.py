"""Acceptance of drafts on recorded text that the target wrote.

A slot is a position to draft from. Each drafted token has an acceptance. In greedy text
it is 1 if the token equals the recorded one, else 0. In sampled text it is the
probability that the token is accepted: the sum of min(p, q) over all token ids. p and q
are the distributions of target and drafter, given the recorded tokens before the
drafted one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_speculation.engine.lookup.lookup import Lookup, SharedPlaces
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.training.data.dialogues import Dialogue
from mlx_speculation.training.kinds.trainee import Trainee
from mlx_speculation.training.teacher import TargetModel
from mlx_speculation.training.unroll import Recorded

ROUND = 4  # drafted tokens of a round, for mean lengths
_ROWS = 16  # dialogues in a batch
_ROUNDED = 64  # rows are padded to a multiple of this many tokens


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance of drafts."""

    # For each d, the share of slots whose first d drafted tokens are all accepted
    positions: tuple[float, ...]
    length: float  # mean number of tokens that a round of `ROUND` drafted tokens emits
    rounds: int  # how many rounds (or slots) `length` is the mean of


def check_acceptance(
    trainee: Trainee,
    target: TargetModel,
    dialogues: Sequence[Dialogue],
    longest: int,
) -> dict[str, Acceptance]:
    """Return a trainee's acceptance on held-out text, under "greedy" and "sampled".

    Dialogues are cut after `longest` tokens. A kind of text without slots is left out.

    Raises:
        InvalidRequestError: every answer is too short to have a slot.
    """
    depths = trainee.depths(ROUND)
    result: dict[str, list[NDArray[np.float64]]] = {"greedy": [], "sampled": []}
    for group in _groups(dialogues):
        temperature = group[0].temperature
        shares = _shares(trainee, target, group, depths, longest)
        for dialogue, share in zip(group, shares, strict=True):
            # Only slots whose first drafted token is the second of the answer or later.
            begin = max(0, int(np.argmax(dialogue.counts)) + 1 - trainee.first)
            length = min(longest, len(dialogue.tokens))
            part = share[begin : max(begin, length - trainee.first - depths + 1)]
            result["sampled" if temperature else "greedy"].append(part)
    accepted = {
        name: _summed(parts, walk=name == "greedy")
        for name, parts in result.items()
        if any(map(len, parts))
    }
    if not accepted:
        raise InvalidRequestError(
            f"None of the {len(dialogues)} held-out answers is long enough to draft "
            f"{depths} tokens of. Raise --answer-tokens, --slots or --held-out."
        )
    return accepted


def lookup_acceptance(dialogues: Sequence[Dialogue]) -> dict[str, Acceptance]:
    """Return the acceptance of prompt lookup, over consecutive rounds of an answer.

    In sampled text too, a token is accepted if it equals the recorded one.
    """
    result: dict[str, list[list[int]]] = {"greedy": [], "sampled": []}
    for dialogue in dialogues:
        tokens = dialogue.tokens.tolist()
        at = int(np.argmax(dialogue.counts)) + 1
        lookup = Lookup(SharedPlaces())
        while not lookup.read_ahead(tokens[:at]):
            pass
        counts = result["sampled" if dialogue.temperature else "greedy"]
        while at < len(tokens):
            drafted = lookup.propose(tokens[:at], ROUND).tokens
            agree = [a == b for a, b in zip(drafted, tokens[at:], strict=False)]
            right = [*agree, False].index(False)
            counts.append([int(depth < right) for depth in range(ROUND)])
            at += right + 1
    return {
        name: _summed([np.array(rounds, np.float64)], walk=False)
        for name, rounds in result.items()
        if rounds
    }


def _groups(dialogues: Sequence[Dialogue]) -> Iterator[list[Dialogue]]:
    """Yield groups of dialogues with equal temperatures and similar lengths."""
    for temperature in sorted({each.temperature for each in dialogues}):
        group = [each for each in dialogues if each.temperature == temperature]
        group.sort(key=lambda each: len(each.tokens))
        for begin in range(0, len(group), _ROWS):
            yield group[begin : begin + _ROWS]


def _shares(
    trainee: Trainee,
    target: TargetModel,
    group: Sequence[Dialogue],
    depths: int,
    longest: int,
) -> NDArray[np.float64]:
    """Return the acceptance of each drafted token, [rows, slots, depths]."""
    least = depths + trainee.first  # at least one slot
    length = max(least, *(min(longest, len(each.tokens)) for each in group))
    length += -length % _ROUNDED
    filled = np.zeros((len(group), length), np.uint32)
    for row, each in zip(filled, group, strict=True):
        part = each.tokens[:length]
        row[: len(part)] = part
    tokens = mx.array(filled)
    lesson = target.lesson(tokens)
    mx.eval(lesson.inputs, lesson.logits)
    n, ids = trainee.slots(tokens, depths), trainee.ids
    temperature = group[0].temperature

    def read(depth: int, logits: mx.array) -> NDArray[np.float64]:
        """Return the acceptance as a NumPy array, so that the logits can be freed."""
        after = depth + trainee.first
        if not temperature:
            column = mx.argmax(logits, axis=-1)
            drafted = column if ids is None else ids[column]
            return np.array(drafted == tokens[:, after : after + n], np.float64)
        theirs = lesson.logits[:, after - 1 : after - 1 + n].astype(mx.float32)
        probs = mx.softmax(theirs / temperature, axis=-1)
        probs = probs if ids is None else mx.take(probs, ids, axis=-1)
        drafted = mx.softmax(logits.astype(mx.float32) / temperature, axis=-1)
        return np.array(mx.minimum(probs, drafted).sum(axis=-1), np.float64)

    made = trainee.run(Recorded(lesson.inputs, tokens, depths), read)
    return np.stack(made, axis=-1)


def _summed(parts: Sequence[NDArray[np.float64]], *, walk: bool) -> Acceptance:
    """Return the mean of `parts`, the acceptance in each dialogue, [slots, depths].

    `walk`: average the lengths of consecutive rounds, not of all slots.
    """
    all_right = [np.cumprod(part, axis=-1) for part in parts if len(part)]
    lengths = []
    for part in all_right:
        tokens = 1 + part[:, :ROUND].sum(axis=-1)
        at = 0
        while at < len(tokens):
            lengths.append(tokens[at])
            at += int(tokens[at]) if walk else 1
    positions = np.concatenate(all_right).mean(axis=0)
    return Acceptance(
        tuple(round(float(share), 4) for share in positions),
        round(float(np.mean(lengths)), 4),
        len(lengths),
    )

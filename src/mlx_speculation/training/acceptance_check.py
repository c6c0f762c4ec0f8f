"""Acceptance of drafts on recorded text that the target wrote.

In greedy text a draft is accepted if it equals the recorded token, as in greedy
decoding. In sampled text the probability of acceptance counts instead: sum_v min(P, q)
of target P and draft q, given the recorded tokens before the draft.

    position d   the share of slots in which drafts 1 to d are all accepted
    length       the mean tokens of a round of `ROUND` drafts, the bonus token included
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_speculation.engine import Sequence as Known
from mlx_speculation.engine.lookup.drafter import LookupDraft, LookupDrafter
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.training.data.dialogues import Dialogue
from mlx_speculation.training.kinds.trainee import (
    Recorded,
    Trainee,
    depths_of,
    slots_of,
)
from mlx_speculation.training.teacher import TargetModel

ROUND = 4  # drafts of a round, for mean lengths
_ROUNDED = 64  # rows are padded to a multiple of this many tokens


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance of drafts.

    Attributes:
        positions: by depth, the share of slots that accept this draft and all before.
        length: mean tokens of a round of `ROUND` drafts.
        rounds: the number of rounds or slots that were averaged.
    """

    positions: tuple[float, ...]
    length: float
    rounds: int


def check_acceptance(
    trainee: Trainee,
    target: TargetModel,
    dialogues: Sequence[Dialogue],
    *,
    rows: int,
    depths: int = ROUND,
    longest: int,
) -> dict[str, Acceptance]:
    """Return the acceptance of a trainee's drafts on greedy and on sampled text.

    Args:
        trainee: the drafter.
        target: the model that wrote the text.
        dialogues: held-out dialogues.
        rows: dialogues in a batch.
        depths: tokens drafted from each slot.
        longest: tokens after which a dialogue is cut.

    Returns:
        The acceptance under "greedy" and "sampled"; a kind without slots is left out.

    Raises:
        InvalidRequestError: every answer is too short for `depths` drafts.
    """
    depths = depths_of(trainee, depths)
    result: dict[str, list[NDArray[np.float64]]] = {"greedy": [], "sampled": []}
    for group in _groups(dialogues, rows):
        temperature = group[0].temperature
        shares = _shares(trainee, target, group, temperature, depths, longest)
        for dialogue, share in zip(group, shares, strict=True):
            part = _counting(dialogue, share, trainee.first, longest)
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
    """Return the acceptance of prompt lookup, over consecutive rounds of an answer."""
    result: dict[str, list[list[int]]] = {"greedy": [], "sampled": []}
    for dialogue in dialogues:
        tokens = dialogue.tokens.tolist()
        at = int(np.argmax(dialogue.counts)) + 1
        drafter, known = LookupDrafter(LookupDraft(history=0)), Known(tokens[:at])
        drafter.begin(known)
        counts = result["sampled" if dialogue.temperature else "greedy"]
        while at < len(tokens):
            known.tokens[:] = tokens[:at]
            drafted: Any = drafter.propose(known, ROUND, _no_choice).tokens.tolist()
            right = 0
            for token, recorded in zip(drafted, tokens[at:], strict=False):
                if token != recorded:
                    break
                right += 1
            counts.append([int(depth < right) for depth in range(ROUND)])
            at += right + 1
    return {
        name: _summed([np.array(rounds, np.float64)], walk=False)
        for name, rounds in result.items()
        if rounds
    }


def _no_choice(logits: mx.array, rows: Any, ids: mx.array | None = None) -> Any:
    raise AssertionError("a lookup chooses nothing")


def _groups(dialogues: Sequence[Dialogue], rows: int) -> Iterator[list[Dialogue]]:
    """Yield groups of dialogues with equal temperatures and similar lengths."""
    for temperature in sorted({each.temperature for each in dialogues}):
        group = [each for each in dialogues if each.temperature == temperature]
        group.sort(key=lambda each: len(each.tokens))
        for begin in range(0, len(group), rows):
            yield group[begin : begin + rows]


def _shares(
    trainee: Trainee,
    target: TargetModel,
    group: Sequence[Dialogue],
    temperature: float,
    depths: int,
    longest: int,
) -> NDArray[np.float64]:
    """Return the acceptance of each single draft, [rows, slots, depths]."""
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
    n, ids = slots_of(trainee, tokens, depths), trainee.ids

    def right(depth: int, logits: mx.array) -> mx.array:
        column = mx.argmax(logits, axis=-1)
        drafted = column if ids is None else ids[column]
        after = depth + trainee.first
        result = drafted == tokens[:, after : after + n]
        return _evaluated(result)

    def overlap(depth: int, logits: mx.array) -> mx.array:
        after = depth + trainee.first - 1
        theirs = lesson.logits[:, after : after + n].astype(mx.float32) / temperature
        probs = mx.softmax(theirs, axis=-1)
        probs = probs if ids is None else mx.take(probs, ids, axis=-1)
        drafted = mx.softmax(logits.astype(mx.float32) / temperature, axis=-1)
        return _evaluated(mx.minimum(probs, drafted).sum(axis=-1))

    read: Callable[[int, mx.array], mx.array] = overlap if temperature else right
    made = trainee.run(Recorded(lesson.inputs, tokens, depths), read)
    return np.stack([np.array(each).astype(np.float64) for each in made], axis=-1)


def _evaluated(array: mx.array) -> mx.array:
    """Evaluate at once, so that memory holds the logits of one depth only."""
    mx.eval(array)
    return array


def _counting(
    dialogue: Dialogue, shares: NDArray[np.float64], first: int, longest: int
) -> NDArray[np.float64]:
    """Return the shares of the slots that draft answer tokens only, [slots, depths].

    The first such slot drafts the second token of the answer.
    """
    depths = shares.shape[-1]
    begin = int(np.argmax(dialogue.counts)) + 1 - first
    end = min(longest, len(dialogue.tokens)) - first - depths + 1
    return shares[max(0, begin) : max(0, begin, end)]


def _summed(parts: Sequence[NDArray[np.float64]], *, walk: bool) -> Acceptance:
    """Return the acceptance of parts [slots, depths].

    With `walk` the lengths are those of consecutive rounds, else those of all slots.
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

"""Loss of a drafter against its target's distribution.

At each slot the target's distribution over the draft's ids is wanted:

    loss = KL(target || draft) + hard * -log draft(the target's likeliest token)

Both are of the probabilities among the draft's ids. Slots whose likeliest token is none
of them do not count.
"""

from typing import Any, NamedTuple

import mlx.core as mx

# How many slots from 0 on, or which ones, int32 [rows, n]
Slots = int | mx.array


class Teacher(NamedTuple):
    """The target's distribution after each position, [rows, positions, ...]."""

    logits: mx.array  # of the draft's ids, [rows, positions, ids]
    # int32 [rows, positions], the column of the likeliest of all tokens; -1 where it is
    # none of the draft's ids
    likeliest: mx.array

    def of_slots(self, first: int, slots: Slots) -> "Teacher":
        """Return that of the position i + first for each slot i."""
        return Teacher(
            at_slots(self.logits, first, slots), at_slots(self.likeliest, first, slots)
        )


def at_slots(values: mx.array, first: int, slots: Slots) -> mx.array:
    """Return what of [rows, positions, ...] is at i + first for each slot i."""
    if isinstance(slots, int):
        return values[:, first : first + slots]
    at = (slots + first).reshape(*slots.shape, *[1] * (values.ndim - 2))
    return mx.take_along_axis(values, at, axis=1)


def distance(
    logits: mx.array, teacher: Teacher, weights: mx.array, hard: float
) -> mx.array:
    """Return the weighted sum of the loss, float32 [].

    Its gradient is made in one pass over the logits: differentiating the formula would
    hold several arrays of their size in float32.

    Args:
        logits: of the draft, [rows, slots, ids].
        teacher: of the same slots.
        weights: float32 [rows, slots]; 0: a slot does not count.
        hard: the weight of the likeliest token's term.
    """
    wanted = mx.logsumexp(teacher.logits.astype(mx.float32), axis=-1, keepdims=True)
    columns = teacher.likeliest[..., None]
    index = mx.maximum(columns, 0)
    weights = mx.where(teacher.likeliest >= 0, weights, 0.0)[..., None]

    def parts(logits: mx.array) -> tuple[mx.array, mx.array]:
        result = logits.astype(mx.float32)
        return result, mx.logsumexp(result, axis=-1, keepdims=True)

    @mx.custom_function
    def summed(logits: mx.array) -> mx.array:
        result, total = parts(logits)
        target = teacher.logits.astype(mx.float32) - wanted
        soft = (mx.exp(target) * (target - (result - total))).sum(-1, keepdims=True)
        likeliest = mx.take_along_axis(logits, index, -1).astype(mx.float32)
        return (weights * (soft + hard * (total - likeliest))).sum()

    @summed.vjp
    def backward(primal: mx.array, cotangent: mx.array, _: Any) -> mx.array:
        result, total = parts(primal)
        target = teacher.logits.astype(mx.float32) - wanted
        likeliest = mx.arange(primal.shape[-1]) == columns
        slope = (1 + hard) * mx.exp(result - total) - mx.exp(target) - hard * likeliest
        return (cotangent * weights * slope).astype(primal.dtype)

    made: Any = summed(logits)
    loss: mx.array = made
    return loss

"""Loss of a drafter against its target's distribution.

At each slot (position to draft from):

    loss = KL(target || draft) + hard * -log draft(the target's likeliest token)

Both distributions are normalized over the draft's ids. A slot is left out if the
target's likeliest token is not among these ids.
"""

from typing import Any, NamedTuple

import mlx.core as mx

# A number n: slots 0 to n - 1; an array: the slots themselves, int32 [rows, n]
Slots = int | mx.array


class Teacher(NamedTuple):
    """The target's distribution after each position, [rows, positions, ...]."""

    logits: mx.array  # of the draft's ids
    # int32, the column in `logits` of the likeliest token; -1: the draft lacks its id
    likeliest: mx.array

    def of_slots(self, first: int, slots: Slots) -> "Teacher":
        """Return the distributions of the slots; slot i is at position `first` + i."""
        return Teacher(
            at_slots(self.logits, first, slots), at_slots(self.likeliest, first, slots)
        )


def at_slots(values: mx.array, first: int, slots: Slots) -> mx.array:
    """Return the slots' `values` [rows, positions, ...]; slot i is at `first` + i."""
    if isinstance(slots, int):
        return values[:, first : first + slots]
    at = (slots + first).reshape(*slots.shape, *[1] * (values.ndim - 2))
    return mx.take_along_axis(values, at, axis=1)


def distance(
    logits: mx.array, teacher: Teacher, weights: mx.array, hard: float
) -> mx.array:
    """Return the weighted sum of the loss, float32 [].

    `logits` are the draft's, [rows, slots, ids]; `teacher` is of the same slots, and
    `weights` are float32 [rows, slots].

    The gradient has an explicit formula: automatic differentiation would hold several
    float32 arrays of the size of the logits.
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

"""A step of the optimizer: the gradients of batches, and the update of the weights.

Weights and the optimizer's moments are float32. The forward of the drafter computes in
bfloat16 on a GPU and in float32 on a CPU.
"""

import math
import time
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_map

from mlx_speculation.training.data.row_batches import RowBatch, RowBatches
from mlx_speculation.training.kinds.trainee import Trainee
from mlx_speculation.training.loss import Teacher, at_slots, distance
from mlx_speculation.training.teacher import TargetModel
from mlx_speculation.training.unroll import Recorded

HARD = 0.1  # the weight of the likeliest token's term in the loss
LEAST_RATE = 0.02  # the final learning rate, relative to the peak
LARGEST_NORM = 1.0  # to which gradients are clipped


class MatrixDecayAdamW(optim.AdamW):
    """AdamW with weight decay for matrices, and without it for norms and biases."""

    def apply_single(
        self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]
    ) -> mx.array:
        """Return the parameter after its update."""
        rule = optim.AdamW if parameter.ndim > 1 else optim.Adam
        updated: mx.array = rule.apply_single(self, gradient, parameter, state)
        return updated


def new_optimizer(
    rate: float, steps: int, warmup: int, decay: float
) -> MatrixDecayAdamW:
    """Return an optimizer with a linear warm-up and a cosine decay of its rate."""
    warmup = min(warmup, steps // 10)
    schedule = optim.cosine_decay(rate, max(1, steps - warmup), LEAST_RATE * rate)
    if warmup:
        rising = optim.linear_schedule(rate / warmup, rate, warmup)
        schedule = optim.join_schedules([rising, schedule], [warmup])
    return MatrixDecayAdamW(
        schedule, betas=[0.9, 0.95], weight_decay=decay, bias_correction=True
    )


class TrainingStep:
    """Steps of one training.

    The drafter drafts `depths` tokens from each slot, a position of the text. Its
    forward computes in `dtype`. With `checkpoint` the backward pass recomputes each
    depth.
    """

    def __init__(
        self,
        trainee: Trainee,
        target: TargetModel,
        depths: int,
        dtype: mx.Dtype,
        *,
        checkpoint: bool,
    ) -> None:
        self._trainee, self.target = trainee, target
        self._depths, self._dtype, self._checkpoint = depths, dtype, checkpoint
        self._gradients = mx.value_and_grad(self._loss)
        if mx.default_device() == mx.gpu:  # compiling for a CPU takes a minute
            self._gradients = mx.compile(self._gradients)

    def gradients(self, batch: RowBatch) -> tuple[mx.array, Any]:
        """Return the loss of a batch, and its gradients by parameter, float32."""
        tokens, counts = mx.array(batch.tokens), mx.array(batch.counts)
        slots = None if batch.slots is None else mx.array(batch.slots)
        lesson = self.target.lesson(tokens)
        teacher = self.target.teacher(lesson.logits)
        module = self._trainee.module
        parameters = module.trainable_parameters()
        inputs = [each.astype(self._dtype) for each in lesson.inputs]
        module.train()  # some kernels for inference have no gradients
        loss, gradients = self._gradients(
            parameters, inputs, teacher, tokens, counts, slots
        )
        module.eval()
        module.update(parameters)
        return loss, gradients

    def apply(self, optimizer: optim.Optimizer, gradients: Any) -> None:
        """Clip the gradients and update the weights."""
        gradients, _ = optim.clip_grad_norm(gradients, LARGEST_NORM)
        optimizer.update(self._trainee.module, gradients)

    def seconds(self, batches: RowBatches) -> float:
        """Return the seconds of a step; the weights do not change.

        These are of the faster of two steps: on a GPU, the first step also compiles.
        """
        module = self._trainee.module
        kept = module.trainable_parameters()
        optimizer = new_optimizer(1e-6, 1, 0, 0.0)
        optimizer.init(kept)
        taken = math.inf
        for number in range(2):
            began = time.monotonic()
            loss, gradients = self.gradients(batches.batch(number))
            self.apply(optimizer, gradients)
            mx.eval(loss, module.state, optimizer.state)
            taken = min(taken, time.monotonic() - began)
        module.update(kept)
        return taken

    def _loss(
        self,
        parameters: Any,
        inputs: list[mx.array],
        teacher: Teacher,
        tokens: mx.array,
        counts: mx.array,
        slots: mx.array | None,
    ) -> mx.array:
        trainee = self._trainee
        teacher = Teacher(*teacher)
        every = trainee.slots(tokens, self._depths) if slots is None else slots

        def read(depth: int, result: mx.array) -> mx.array:
            after = depth + trainee.first - 1  # slot i drafts token i + after + 1
            rows = teacher.of_slots(after, every)
            weights = at_slots(counts, after + 1, every).astype(mx.float32)
            number = (weights * (rows.likeliest >= 0)).sum()
            weights = weights / mx.maximum(number, 1)
            return distance(result, rows, weights, HARD)

        trainee.module.update(
            tree_map(lambda weight: weight.astype(self._dtype), parameters)
        )
        text = Recorded(inputs, tokens, self._depths, slots, self._checkpoint)
        made = trainee.run(text, read)
        faded = [trainee.fading**depth * loss for depth, loss in enumerate(made)]
        total: mx.array = sum(faded[1:], start=faded[0])
        return total

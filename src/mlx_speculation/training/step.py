"""A step of the optimizer: gradients of batches of rows, added up, and applied.

Weights and the optimizer's moments are float32; the drafter runs in the type of the
target's states on a GPU, and in float32 on a CPU.
"""

from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_map

from mlx_speculation.training.kinds.trainee import Trainee, slots_of
from mlx_speculation.training.loss import Teacher, distance
from mlx_speculation.training.teacher import TargetModel

FADING = 0.8  # what a depth counts over the one before, as in EAGLE-3
HARD = 0.1  # the weight of the likeliest token beside the distribution
LEAST_RATE = 0.02  # of the highest one, at the end
LARGEST_NORM = 1.0


class MatrixDecayAdamW(optim.AdamW):
    """AdamW in which matrices alone decay: norms and biases do not."""

    def apply_single(
        self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]
    ) -> mx.array:
        """Return the parameter after its update; see `mlx.optimizers`."""
        rule = optim.AdamW if parameter.ndim > 1 else optim.Adam
        updated: mx.array = rule.apply_single(self, gradient, parameter, state)
        return updated


def new_optimizer(
    rate: float, steps: int, warmup: int, decay: float
) -> MatrixDecayAdamW:
    """Return an optimizer that warms up, then falls as a cosine does over all steps."""
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

    Args:
        trainee: what is trained.
        target: its teacher.
        depths: how many tokens are drafted.
        dtype: in which the drafter runs.
        checkpoint: whether each depth is computed again for its gradients.
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
        self._trainee, self._target = trainee, target
        self._depths, self._dtype, self._checkpoint = depths, dtype, checkpoint
        self._gradients = mx.value_and_grad(self._loss)
        if mx.default_device() == mx.gpu:  # a CPU's compiler takes a minute
            self._gradients = mx.compile(self._gradients)

    def gradients(self, tokens: mx.array, counts: mx.array) -> tuple[mx.array, Any]:
        """Return the loss of a batch, and its gradients by parameter, float32.

        Args:
            tokens: ids [rows, tokens].
            counts: bool [rows, tokens], which of them are to be learned.
        """
        lesson = self._target.lesson(tokens)
        teacher = self._target.teacher(lesson.logits)
        module = self._trainee.module
        parameters = module.trainable_parameters()
        inputs = [each.astype(self._dtype) for each in lesson.inputs]
        module.train()  # some kernels of a model have no gradients
        loss, gradients = self._gradients(
            parameters, inputs, teacher.logits, teacher.likeliest, tokens, counts
        )
        module.eval()
        module.update(parameters)
        return loss, gradients

    def apply(self, optimizer: optim.Optimizer, gradients: Any) -> None:
        """Change the weights by gradients."""
        gradients, _ = optim.clip_grad_norm(gradients, LARGEST_NORM)
        optimizer.update(self._trainee.module, gradients)

    def _loss(
        self,
        parameters: Any,
        inputs: list[mx.array],
        logits: mx.array,
        likeliest: mx.array,
        tokens: mx.array,
        counts: mx.array,
    ) -> mx.array:
        trainee = self._trainee
        teacher = Teacher(logits, likeliest)
        n = slots_of(trainee, tokens, self._depths)

        def read(depth: int, found: mx.array) -> mx.array:
            after = depth + trainee.first - 1  # the position that the drafted one is of
            own = teacher.behind(after, n)
            weights = counts[:, after + 1 : after + 1 + n].astype(mx.float32)
            number = (weights * (own.likeliest >= 0)).sum()
            weights = weights / mx.maximum(number, 1)
            return distance(found, own, weights, HARD)

        trainee.module.update(
            tree_map(lambda weight: weight.astype(self._dtype), parameters)
        )
        made = trainee.run(
            inputs, tokens, self._depths, read, checkpoint=self._checkpoint
        )
        faded = [FADING**depth * loss for depth, loss in enumerate(made)]
        total: mx.array = sum(faded[1:], start=faded[0])
        return total

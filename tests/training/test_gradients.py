"""Loss and gradients equal those of torch code that drafts from one slot at a time."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx.utils import tree_flatten

from mlx_speculation.training.data.row_batches import RowBatch
from mlx_speculation.training.kinds.eagle_head import EagleTrainee
from mlx_speculation.training.loss import Teacher, distance
from mlx_speculation.training.step import HARD, TrainingStep
from mlx_speculation.training.teacher import TargetModel
from support.identity import prompt_of
from support.references import eagle_unroll
from support.references.reference_target import tables, target

SLOTS, DEPTHS, ROWS = 6, 3, 2
CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_theta": 500.0,
}


def trainee() -> EagleTrainee:
    ids = np.arange(0, 256, 3)
    made = EagleTrainee(target(), CONFIG, ids, [0, 3, 6], seed=4)
    spread = 8 * mx.random.normal((64, 64), key=mx.random.key(3)) / 64
    attention: Any = made.module.midlayer.self_attn
    attention.o_proj.weight = attention.o_proj.weight + spread
    return made


@pytest.mark.parametrize("checkpoint", [False, True])
def test_loss_and_gradients_are_those_of_the_reference(checkpoint: bool) -> None:
    head = trainee()
    teacher = TargetModel(target(), head)
    step = TrainingStep(head, teacher, DEPTHS, mx.float32, checkpoint=checkpoint)
    length = SLOTS + DEPTHS + 1
    rows = [prompt_of(ROWS * length)[i * length :][:length] for i in range(ROWS)]
    counts = np.ones((ROWS, length), np.bool_)
    counts[0, :5] = counts[1, 4] = False
    loss, gradients = step.gradients(RowBatch(np.array(rows, np.uint32), counts))

    module: Any = head.module
    flat: Any = tree_flatten(module.parameters())
    weights = {
        name: torch.tensor(np.array(value, np.float64), requires_grad=True)
        for name, value in flat
    }
    expected = reference_loss(head, teacher, weights, rows, counts)
    expected.backward()
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-5)
    by_name: Any = dict(tree_flatten(gradients))
    assert by_name.keys() == weights.keys()
    for name, value in weights.items():
        assert value.grad is not None
        wanted = value.grad.numpy()
        error = np.abs(np.array(by_name[name], np.float64) - wanted).max()
        assert error < 1e-4 * np.abs(wanted).max(), name


def reference_loss(
    head: EagleTrainee,
    teacher: TargetModel,
    weights: dict[str, torch.Tensor],
    rows: list[list[int]],
    counts: np.ndarray[Any, Any],
) -> torch.Tensor:
    """Return the sum over depths of `fading`**depth times the slots' mean loss."""
    embedding = tables()["embedding"]
    parts: list[list[torch.Tensor]] = []
    numbers = []
    for row, counted in zip(rows, counts, strict=True):
        lesson = teacher.lesson(mx.array([row]))
        wanted = np.array(lesson.logits[0], np.float64)
        ids = np.array(head.ids)
        column = {int(token): place for place, token in enumerate(ids)}
        likeliest = [column.get(int(token), -1) for token in wanted.argmax(-1)]
        depth_losses, number = [], []
        for depth in range(DEPTHS):
            sums = eagle_unroll.depth_loss(
                weights,
                head._config,
                [torch.tensor(np.array(each[0], np.float64)) for each in lesson.inputs],
                torch.tensor(embedding[row]),
                torch.tensor(wanted[:, ids]),
                likeliest,
                counted.tolist(),
                slots=SLOTS,
                depth=depth,
                hard=HARD,
            )
            depth_losses.append(sums[0])
            number.append(sums[1])
        parts.append(depth_losses)
        numbers.append(number)
    total = torch.zeros((), dtype=torch.float64)
    for depth in range(DEPTHS):
        summed = torch.stack([depth_losses[depth] for depth_losses in parts]).sum()
        total = total + head.fading**depth * summed / sum(n[depth] for n in numbers)
    return total


def test_the_gradient_by_logits_is_that_of_the_formula() -> None:
    """A gradient has the dtype of its logits; it is 0 where `likeliest` is -1."""
    draw = np.random.default_rng(1)
    logits, wanted = draw.normal(size=(2, 2, 3, 11)) * 3
    likeliest = np.array([[0, -1, 10], [4, 5, -1]])
    weights = draw.uniform(size=(2, 3))
    teacher = Teacher(mx.array(wanted), mx.array(likeliest.astype(np.int32)))
    given = mx.array(logits.astype(np.float32))
    scales = mx.array(weights.astype(np.float32))
    value, slope = mx.value_and_grad(lambda x: 3 * distance(x, teacher, scales, 0.25))(
        given
    )

    variable = torch.tensor(logits, requires_grad=True)
    log = variable.log_softmax(-1)
    target = torch.tensor(wanted).log_softmax(-1)
    soft = (target.exp() * (target - log)).sum(-1)
    index = torch.tensor(likeliest).clamp(min=0)[..., None]
    hard = -log.gather(-1, index)[..., 0]
    counted = torch.tensor(weights) * (torch.tensor(likeliest) >= 0)
    expected = 3 * ((soft + 0.25 * hard) * counted).sum()
    expected.backward()
    assert float(value) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert np.abs(np.array(slope) - variable.grad.numpy()).max() < 1e-5
    half = mx.grad(lambda x: distance(x, teacher, scales, 0.25))(
        given.astype(mx.bfloat16)
    )
    assert half.dtype == mx.bfloat16
    nothing = Teacher(teacher.logits, mx.full((2, 3), -1, mx.int32))
    assert not mx.grad(lambda x: distance(x, nothing, scales, 0.25))(given).any()

"""Options of a training of a few steps, and the accepted lengths that it reaches."""

from mlx_speculation.training.options import TrainOptions
from mlx_speculation.training.training_run import TrainingResult

OPTIONS = TrainOptions(
    dialogues=12,
    held_out=6,
    answer_tokens=24,
    prompt_tokens=8,
    batch=12,
    steps=12,
    rows=2,
    slots=48,
    depths=3,
    draft_vocab=128,
    evaluations=3,
    rate=8e-3,
    skip_speed=True,
)


def lengths(result: TrainingResult) -> list[float]:
    """Return the mean accepted length of each evaluation, over all kinds of text."""
    return [
        sum(acceptance["length"] for acceptance in each["acceptance"].values())
        / len(each["acceptance"])
        for each in result.record["evaluations"]
    ]

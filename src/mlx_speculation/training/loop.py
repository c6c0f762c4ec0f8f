"""The training loop: steps, evaluations, and saved states.

The loop ends after all steps, when evaluations no longer improve, when the time is up,
or at Ctrl-C. In the last two cases the training can be resumed.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_map

from mlx_speculation.interrupts import DeferredSignals, checkpoint
from mlx_speculation.training.acceptance_check import Acceptance
from mlx_speculation.training.data.row_batches import RowBatches
from mlx_speculation.training.kinds.trainee import Trainee
from mlx_speculation.training.options import TrainOptions
from mlx_speculation.training.state import Progress, save_state
from mlx_speculation.training.step import TrainingStep

_GAIN = 0.002  # a smaller increase of the mean accepted length is no gain
_SAVED = 45.0  # seconds after which the state is saved again
_LOOKED = 10  # maximum steps of a chunk; losses are read after each chunk
_CHUNK = 8.0  # maximum seconds of a chunk, unless one step takes longer


@dataclass(slots=True)
class Reports:
    """Progress callbacks; by default they do nothing.

    `data` gets the number of dialogues so far, and the number wanted. `step` gets the
    mean loss of the newest chunk of steps.
    """

    phase: Callable[[str], None] = lambda name: None
    say: Callable[[str], None] = lambda line: None
    data: Callable[[int, int], None] = lambda done, whole: None
    step: Callable[[Progress, float], None] = lambda progress, loss: None
    evaluated: Callable[[Progress], None] = lambda progress: None


@dataclass(slots=True)
class TrainingLoop:
    """The steps of one training."""

    options: TrainOptions
    fixed: dict[str, Any]  # options that a resumed training must not change
    trainee: Trainee
    stepper: TrainingStep
    optimizer: optim.Optimizer
    batches: RowBatches
    progress: Progress
    folder: Path  # of the saved state
    evaluate: Callable[[], dict[str, Acceptance]]  # on held-out text
    # Writes the draft's files; called after each evaluation with a gain
    keep: Callable[[], None]
    reports: Reports
    between: int  # steps between evaluations
    deadline: float | None  # a time of `time.monotonic`; None: no deadline
    each: float  # seconds of a step; 0: not known yet
    _steps_took: float = field(default=0.0, init=False)  # seconds of the last chunk
    _evaluation_took: float = field(default=0.0, init=False)

    def run(self) -> str:
        """Train; return why it ended: "steps", "stale", "time" or "interrupt"."""
        progress = self.progress
        if not progress.history:
            self._evaluated()
        saved = time.monotonic()
        try:
            while not progress.done:
                if self._runs_out:
                    if progress.history[-1]["step"] < progress.step:
                        self._evaluated()
                    return "time"
                with DeferredSignals(checkpoints=True):
                    self._steps()
                    if progress.step % self.between == 0 or self._last:
                        self._evaluated()
                        saved = time.monotonic()
                    elif time.monotonic() - saved > _SAVED:
                        self._save()
                        saved = time.monotonic()
                    checkpoint()
        except KeyboardInterrupt:
            self._save()
            return "interrupt"
        return "steps" if self._last else "stale"

    @property
    def _last(self) -> bool:
        return self.progress.step >= self.progress.steps

    @property
    def _runs_out(self) -> bool:
        """Return whether the time is too short for more steps and an evaluation."""
        needed = self._steps_took + self._evaluation_took
        return self.deadline is not None and time.monotonic() + needed >= self.deadline

    def _steps(self) -> None:
        """Take a chunk of steps, at most up to the next evaluation."""
        progress, began, first = self.progress, time.monotonic(), self.progress.step
        most = max(1, min(_LOOKED, int(_CHUNK / self.each))) if self.each else _LOOKED
        self.reports.phase(f"step {first + 1} of {progress.steps}")
        stop = min(
            progress.steps, first + most, (first // self.between + 1) * self.between
        )
        losses: list[mx.array] = []
        while progress.step < stop:
            losses.append(self._step())
            # mlx computes this step while Python builds the next one's graph.
            mx.async_eval(losses[-1], self.trainee.module.state, self.optimizer.state)
            if len(losses) > 1:
                mx.eval(losses[-2])
            progress.step += 1
        mx.eval(losses, self.trainee.module.state, self.optimizer.state)
        self._steps_took = time.monotonic() - began
        self.each = self._steps_took / len(losses)
        progress.seconds += self._steps_took
        loss = float(mx.stack(losses).mean())
        progress.losses.append([progress.step, round(loss, 5)])
        self.reports.step(progress, loss)

    def _step(self) -> mx.array:
        """Apply the mean gradients of a step's batches; return their mean loss."""
        count = self.options.accumulate
        first, scale = self.progress.step * count, 1 / count
        loss, gradients = self.stepper.gradients(self.batches.batch(first))
        for number in range(first + 1, first + count):
            more, added = self.stepper.gradients(self.batches.batch(number))
            gradients = tree_map(mx.add, gradients, added)
            loss = loss + more
            mx.eval(gradients, loss)
        if count > 1:
            gradients = tree_map(lambda value: value * scale, gradients)
        self.stepper.apply(self.optimizer, gradients)
        return loss * scale

    def _evaluated(self) -> None:
        """Evaluate, write the draft if it has improved, and save the state."""
        progress, began = self.progress, time.monotonic()
        self.reports.phase(f"evaluation after step {progress.step}")
        result = self.evaluate()
        self._evaluation_took = time.monotonic() - began
        lengths = [each.length for each in result.values()]
        length = sum(lengths) / len(lengths)
        progress.history.append(
            {
                "step": progress.step,
                "seconds": round(progress.seconds, 1),
                "acceptance": {name: asdict(each) for name, each in result.items()},
            }
        )
        if not progress.step:
            pass  # an untrained draft is not written
        elif length > progress.best[0] + _GAIN:
            progress.best, progress.stale = (length, progress.step), 0
            self.keep()
        else:
            progress.stale += 1
        stale = self.options.patience and progress.stale >= self.options.patience
        progress.done = bool(self._last or stale)
        self._save()
        self.reports.evaluated(progress)

    def _save(self) -> None:
        module = self.trainee.module
        save_state(self.folder, self.progress, self.fixed, module, self.optimizer)

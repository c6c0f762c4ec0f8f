"""The loop: steps, evaluations, what is kept, and when it ends.

It ends when all steps are taken, when evaluations no longer gain, when the time is up,
or at Ctrl-C; the last two leave a state from which the same steps follow.
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
from mlx_speculation.training.state import Progress, save_state
from mlx_speculation.training.step import TrainingStep

_GAIN = 0.002  # of the mean length: less is no gain
_SAVED = 45.0  # seconds between states at most
_LOOKED = 10  # steps between losses that are read, at most
_CHUNK = 8.0  # seconds of them, at most, where one step takes less
_PARTS = ("steps", "evaluation")  # what has to fit before the deadline

Evaluate = Callable[[], dict[str, Acceptance]]
Ended = str


@dataclass(slots=True)
class Reports:
    """Progress callbacks; by default they do nothing.

    Attributes:
        say: called with a line.
        data: called with how many dialogues there are, of how many.
        step: called with the progress and the newest mean loss.
        evaluated: called with the progress after each evaluation.
        phase: called with the name of what begins.
    """

    phase: Callable[[str], None] = lambda name: None
    say: Callable[[str], None] = lambda line: None
    data: Callable[[int, int], None] = lambda done, whole: None
    step: Callable[[Progress, float], None] = lambda progress, loss: None
    evaluated: Callable[[Progress], None] = lambda progress: None


@dataclass(slots=True)
class TrainingLoop:
    """One training."""

    trainee: Trainee  # what is trained
    stepper: TrainingStep  # makes gradients and applies them
    optimizer: optim.Optimizer  # with its state
    batches: RowBatches  # of rows
    progress: Progress  # where it stands
    options: dict[str, Any]  # what has to be the same when it is resumed
    folder: Path  # where its state is kept
    evaluate: Evaluate  # measures acceptance on held-out text
    # Writes the draft's files, after an evaluation that gained
    keep: Callable[[], None]
    reports: Reports
    accumulate: int  # batches of a step
    between: int  # steps between evaluations
    patience: int  # evaluations without gain that end it; 0: never
    deadline: float | None = None  # when to stop, of `time.monotonic`; None: never
    # How long the last steps and the last evaluation took, in seconds
    took: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys((*_PARTS, "step"), 0.0)
    )

    def run(self) -> Ended:
        """Train; return why it has ended: "steps", "stale", "time" or "interrupt"."""
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
        """Return whether there is no time for more steps and an evaluation of them."""
        if self.deadline is None:
            return False
        needed = sum(self.took[part] for part in _PARTS)
        return time.monotonic() + needed >= self.deadline

    def _steps(self) -> None:
        """Take a few steps, up to the next evaluation at most."""
        progress, began = self.progress, time.monotonic()
        first, each = progress.step, self.took["step"]
        looked = max(1, min(_LOOKED, int(_CHUNK / each))) if each else _LOOKED
        self.reports.phase(f"step {first + 1} of {progress.steps}")
        stop = min(
            progress.steps,
            progress.step + looked,
            (progress.step // self.between + 1) * self.between,
        )
        losses: list[mx.array] = []
        while progress.step < stop:
            losses.append(self._step())
            # One step is computed while the next is built.
            mx.async_eval(losses[-1], self.trainee.module.state, self.optimizer.state)
            if len(losses) > 1:
                mx.eval(losses[-2])
            progress.step += 1
        mx.eval(losses, self.trainee.module.state, self.optimizer.state)
        self.took["steps"] = time.monotonic() - began
        self.took["step"] = self.took["steps"] / (stop - first)
        progress.seconds += self.took["steps"]
        loss = float(mx.stack(losses).mean())
        progress.losses.append((progress.step, round(loss, 5)))
        self.reports.step(progress, loss)

    def _step(self) -> mx.array:
        loss, gradients = self._gradients(self.progress.step * self.accumulate)
        for more in range(1, self.accumulate):
            gradient, added = self._gradients(
                self.progress.step * self.accumulate + more
            )
            gradients = tree_map(mx.add, gradients, added)
            loss = loss + gradient
            mx.eval(gradients, loss)
        scale = 1 / self.accumulate
        if self.accumulate > 1:
            gradients = tree_map(lambda value: value * scale, gradients)
        self.stepper.apply(self.optimizer, gradients)
        return loss * scale

    def _gradients(self, number: int) -> tuple[mx.array, Any]:
        return self.stepper.gradients(self.batches.batch(number))

    def _evaluated(self) -> None:
        """Evaluate, keep what is better, and save the state."""
        progress, began = self.progress, time.monotonic()
        self.reports.phase(f"evaluation after step {progress.step}")
        result = self.evaluate()
        self.took["evaluation"] = time.monotonic() - began
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
            pass  # what an untrained draft accepts: it is not written
        elif length > progress.best[0] + _GAIN:
            progress.best, progress.stale = (length, progress.step), 0
            self.keep()
        else:
            progress.stale += 1
        stale = self.patience and progress.stale >= self.patience
        progress.done = bool(self._last or stale)
        self._save()
        self.reports.evaluated(progress)

    def _save(self) -> None:
        save_state(
            self.folder,
            self.progress,
            self.options,
            self.trainee.module,
            self.optimizer,
        )

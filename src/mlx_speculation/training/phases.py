"""The phases of a training, in order: data, steps and evaluations, written files."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import logit_width, read_config
from mlx_speculation.models.config_json import text_config
from mlx_speculation.models.mtp.fingerprints import target_hash
from mlx_speculation.training.acceptance_check import (
    Acceptance,
    check_acceptance,
    lookup_acceptance,
)
from mlx_speculation.training.data.collect import Collector
from mlx_speculation.training.data.dialogues import Dialogue, Dialogues
from mlx_speculation.training.data.draft_ids import coverage
from mlx_speculation.training.data.row_batches import RowBatches
from mlx_speculation.training.kinds.choose_trainee import (
    check_trainee,
    learning_rate,
    make_trainee,
)
from mlx_speculation.training.kinds.trainee import Trainee, depths_of
from mlx_speculation.training.loop import Reports, TrainingLoop
from mlx_speculation.training.memory_estimate import choose_checkpoint, shape_of
from mlx_speculation.training.options import TrainOptions
from mlx_speculation.training.output.curves import PLOT
from mlx_speculation.training.output.preflight import drawn, try_outputs
from mlx_speculation.training.output.record import write_record
from mlx_speculation.training.output.speeds import Speeds
from mlx_speculation.training.output.summary import described, measured
from mlx_speculation.training.plan import (
    DATA_END,
    DATA_SHARE,
    STEPS_END,
    TRIAL,
    Schedule,
    changed,
    made_up_batches,
    position_seconds,
    rates_of,
    step_seconds,
)
from mlx_speculation.training.reports import TrainingResult
from mlx_speculation.training.state import Progress, load_state, read_progress
from mlx_speculation.training.step import TrainingStep, new_optimizer
from mlx_speculation.training.teacher import TargetModel

RUN = "run"
_EVALUATED_ROWS = 16


@dataclass(slots=True)
class Setup:
    """Makes the draft, its training step and its optimizer from the options."""

    folder: Path  # the target's
    model: nn.Module
    tokenizer: Any
    options: TrainOptions
    say: Callable[[str], None]

    def trainee(self, learned: list[Any], ids: list[int]) -> Trainee:
        """Return the drafter, untrained; `learned` and `ids` as in `make_trainee`."""
        return make_trainee(
            self.options,
            self.model,
            self.tokenizer,
            self.folder,
            learned=learned,
            ids=ids,
        )

    def stepper(self, trainee: Trainee) -> tuple[TrainingStep, TargetModel, int]:
        """Return the training step, the teacher, and the number of drafted tokens."""
        depths = depths_of(trainee, self.options.unrolled)
        target = TargetModel(self.model, trainee)
        dtype = mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16
        checkpoint = self._checkpoint(trainee, depths, dtype)
        stepper = TrainingStep(trainee, target, depths, dtype, checkpoint=checkpoint)
        return stepper, target, depths

    def optimizer(
        self, trainee: Trainee, steps: int, state: Path | None = None
    ) -> optim.Optimizer:
        """Return an optimizer; with `state` load it and the trainee's weights."""
        optimizer = new_optimizer(
            learning_rate(self.options, self._text_config().get("hidden_size") or 1024),
            steps,
            self.options.warmup,
            self.options.weight_decay,
        )
        if state is None:
            optimizer.init(trainee.module.trainable_parameters())
        else:
            load_state(state, trainee.module, optimizer)
        return optimizer

    def _text_config(self) -> dict[str, Any]:
        return text_config(read_config(self.folder))

    def _checkpoint(self, trainee: Trainee, depths: int, dtype: mx.Dtype) -> bool:
        """Return whether to use gradient checkpointing; refuse too little memory."""
        config, width = self._text_config(), logit_width(self.model)
        shape = shape_of(self.options, trainee, config, width, depths, dtype.size)
        checkpoint, needed = choose_checkpoint(
            self.model,
            trainee.module,
            shape,
            self.options.checkpoint,
            self.options.memory_gb,
        )
        again = ", each depth computed again" if checkpoint else ""
        self.say(f"about {needed / 1e9:.1f} GB of memory{again}")
        return checkpoint


@dataclass(slots=True)
class Run:
    """One training; `whole` runs it."""

    name: str  # of the target
    setup: Setup
    out: Path  # the draft's folder
    reports: Reports
    schedule: Schedule
    lookup: dict[str, Acceptance] = field(default_factory=dict)
    sized: dict[str, Any] = field(default_factory=dict)  # options made smaller

    @property
    def options(self) -> TrainOptions:
        """Options of the training, adapted to its time."""
        return self.setup.options

    def whole(self, prompts: list[Any]) -> TrainingResult:
        """Run the phases that an earlier run has not completed."""
        fingerprint = target_hash(self.setup.folder)
        fixed = {**self.options.fixed(), "target": fingerprint}
        progress = read_progress(self.out / RUN, fixed)
        if progress is None:
            self.reports.phase("checking what is to be trained")
            check_trainee(
                self.options, self.setup.model, self.setup.tokenizer, self.setup.folder
            )
            self._fit()
        else:
            self.setup.options = replace(self.options, **progress.sized)
        if not self.options.data_only:
            try_outputs(self.out, self.reports.say)
        self.reports.phase("dialogues")
        dialogues = self._dialogues(fingerprint, prompts, progress)
        if self.options.data_only:
            data = self._described(dialogues, dialogues.training)
            return TrainingResult(self.out, "data", {"data": data})
        learned = dialogues.training
        if progress is not None:
            learned = learned[: progress.dialogues]
        trainee = self.setup.trainee(learned, [] if progress is None else progress.ids)
        stepper, target, depths = self.setup.stepper(trainee)
        batches = RowBatches(
            learned,
            self.options.rows,
            self.options.slots,
            depths + trainee.first - 1,
            self.options.seed,
            self.options.drafted_slots,
            trainee.first,
        )
        evaluated = self.schedule.evaluated(self.options, dialogues.held_out)
        self.reports.phase("lookups on held-out text")
        self.lookup = lookup_acceptance(evaluated)
        fresh = progress is None
        if progress is None:
            steps = self._steps(stepper, batches)
            ids = [] if trainee.ids is None else np.array(trainee.ids).tolist()
            progress = Progress(steps, len(learned), ids, sized=self.sized)
        state = None if fresh else self.out / RUN
        optimizer = self.setup.optimizer(trainee, progress.steps, state)
        loop = self._loop(
            trainee, stepper, target, optimizer, batches, progress, fixed, evaluated
        )
        self.reports.say(
            f"{progress.steps} steps of {self.options.rows * self.options.accumulate} "
            f"rows of {self.options.slots}, {progress.step} of them taken; "
            f"{len(learned)} dialogues, {batches.per_pass} batches a pass"
        )
        ended = loop.run()
        if not progress.step and ended == "time":
            raise InvalidRequestError(
                f"The {self.options.minutes:g} minutes are over, and no step was taken "
                f"yet; {len(learned)} dialogues are kept in {dialogues.file}. The same "
                "command with more --minutes goes on from there."
            )
        return self._finished(trainee, dialogues, learned, progress, fixed, ended)

    def _fit(self) -> None:
        """Reduce sizes in the options until the training fits into its minutes.

        Raises:
            InvalidRequestError: the minutes are too few for any training.
        """
        options = self.options
        if options.minutes is None or options.data_only:
            return
        seconds = 60 * options.minutes
        width = logit_width(self.setup.model)
        count = min(options.vocabulary or width, width)
        self.reports.phase("timing a step")
        trainee = self.setup.trainee([], list(range(count)))
        stepper, _, depths = self.setup.stepper(trainee)

        def run(rows: int, slots: int) -> float:
            batches = made_up_batches(
                width,
                rows,
                slots,
                depths + trainee.first - 1,
                options.drafted_slots,
                trainee.first,
            )
            return stepper.seconds(batches)

        position = position_seconds(run, options.rows, options.slots, TRIAL * seconds)
        self.reports.phase("timing dialogues")
        rates = rates_of(self.setup.model, position, options.batch)
        self.setup.options = self.schedule.fit(options, rates)
        self.sized = changed(options, self.options)
        if self.sized:
            made = ", ".join(f"{name} {value}" for name, value in self.sized.items())
            self.reports.say(f"made smaller for {options.minutes:g} minutes: {made}")
        mx.clear_cache()

    def _loop(
        self,
        trainee: Trainee,
        stepper: TrainingStep,
        target: TargetModel,
        optimizer: Any,
        batches: RowBatches,
        progress: Progress,
        fixed: dict[str, Any],
        evaluated: list[Any],
    ) -> TrainingLoop:
        options = self.options  # a prompt and its answer can be longer than the slots
        longest = max(options.slots, options.prompt_tokens + options.answer_tokens)
        longest += depths_of(trainee, options.unrolled)
        loop = TrainingLoop(
            trainee,
            stepper,
            optimizer,
            batches,
            progress,
            fixed,
            self.out / RUN,
            lambda: check_acceptance(
                trainee, target, evaluated, rows=_EVALUATED_ROWS, longest=longest
            ),
            lambda: trainee.save(self.out, self.options.bits),
            self.reports,
            self.options.accumulate,
            max(1, progress.steps // self.schedule.evaluations(options)),
            self.options.patience,
            self.schedule.deadline(STEPS_END),
        )
        if self.schedule.rates is not None:
            loop.took["step"] = step_seconds(options, self.schedule.rates)
        return loop

    def _dialogues(
        self, fingerprint: str, prompts: list[Any], progress: Progress | None
    ) -> Dialogues:
        path = self.out / RUN / "dialogues.safetensors"
        file, *more = self.options.data or [path]
        dialogues = Dialogues.open(file, fingerprint, more)
        collector = Collector(
            self.setup.model, self.setup.tokenizer, self.options, prompts
        )
        share, end = DATA_SHARE, DATA_END
        if self.options.data_only:
            share = end = 1.0
        if progress is None:
            try:
                collector.fill(
                    dialogues,
                    self.reports.data,
                    self.schedule.running_out(share),
                    lambda: self.schedule.is_over(end),
                )
            except KeyboardInterrupt:
                self.reports.say(
                    f"{len(dialogues.all)} dialogues are kept in {dialogues.file}; "
                    "the same command goes on from there."
                )
                raise
        if not dialogues.training or not dialogues.held_out:
            raise InvalidRequestError(
                f"There are {len(dialogues.training)} dialogues to learn from and "
                f"{len(dialogues.held_out)} to evaluate on. Pass more prompts, or a "
                "smaller --held-out."
            )
        mx.clear_cache()
        return dialogues

    def _steps(self, stepper: TrainingStep, batches: RowBatches) -> int:
        """Return the number of steps to take."""
        options = self.options
        if options.steps is not None:
            return options.steps
        if options.minutes is None:
            return max(1, round(options.epochs * batches.per_pass / options.accumulate))
        self.reports.phase("timing a step")
        return self.schedule.steps(stepper.seconds(batches) * options.accumulate)

    def _described(
        self, dialogues: Dialogues, learned: Sequence[Dialogue]
    ) -> dict[str, Any]:
        return described(dialogues, learned, (self.options.data or [])[1:])

    def _finished(
        self,
        trainee: Trainee,
        dialogues: Dialogues,
        learned: list[Any],
        progress: Progress,
        fixed: dict[str, Any],
        ended: str,
    ) -> TrainingResult:
        evaluated = dialogues.held_out
        data = self._described(dialogues, learned)
        if trainee.ids is not None:
            ids = np.array(trainee.ids)
            data["coverage"] = round(coverage(evaluated, ids), 4)
        drawn(self.out / PLOT, progress, self.lookup, self.reports.say)

        def record(speeds: Speeds | None) -> dict[str, Any]:
            return write_record(
                self.out,
                target=self.name,
                options=fixed,
                progress=progress,
                data=data,
                lookup=self.lookup,
                speeds=speeds,
                ended=ended,
            )

        written = record(None)  # now, since measuring may fail or be interrupted
        speeds, pairing = None, ""
        trained = ended in ("steps", "stale", "time") and progress.best[1]
        if trained and not self.options.skip_speed:
            self.reports.phase("measuring speeds")
            speeds, pairing = measured(
                self.setup.model,
                self.setup.tokenizer,
                trainee,
                evaluated,
                self.setup.folder,
                self.out,
                self.schedule.deadline(),
            )
            written = record(speeds)
        return TrainingResult(self.out, ended, written, speeds, pairing)

"""The phases of a training, in order: data, steps, evaluations, and what is written."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
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
from mlx_speculation.training.data.dialogues import Dialogues
from mlx_speculation.training.data.draft_ids import coverage
from mlx_speculation.training.data.row_batches import RowBatches
from mlx_speculation.training.kinds.choose_trainee import (
    check_trainee,
    learning_rate,
    make_trainee,
)
from mlx_speculation.training.kinds.trainee import Trainee, depths_of
from mlx_speculation.training.loop import TrainingLoop, Watch
from mlx_speculation.training.memory_estimate import BatchShape, choose_checkpoint
from mlx_speculation.training.options import BLOCK_LAYERS, TrainOptions
from mlx_speculation.training.output.curves import PLOT
from mlx_speculation.training.output.preflight import drawn, try_outputs
from mlx_speculation.training.output.record import write_record
from mlx_speculation.training.output.speeds import Speeds
from mlx_speculation.training.output.summary import described, measured
from mlx_speculation.training.plan import (
    TRIAL,
    Rates,
    changed,
    evaluated,
    made_up_batches,
    position_seconds,
    rates_of,
    sized,
    step_seconds,
)
from mlx_speculation.training.reports import Reports, TrainingResult
from mlx_speculation.training.state import Progress, load_state, read_progress
from mlx_speculation.training.step import TrainingStep, new_optimizer
from mlx_speculation.training.teacher import TargetModel

RUN = "run"
# Of the minutes after timing: when no further dialogues are begun, when those that are
# being written are cut, and when the last evaluation has to be done.
_DATA_SHARE, _DATA_END, _STEPS_END = 0.4, 0.5, 0.88
_STEP_SHARE = 0.75  # of the time that is left then, for steps
_MOST_EVALUATIONS = 5  # of a training that has minutes
_EVALUATED_ROWS = 16


@dataclass(slots=True)
class Run:
    """One training; its methods are called in order."""

    name: str
    folder: Path
    model: nn.Module
    tokenizer: Any
    out: Path
    options: TrainOptions
    reports: Reports
    began: float
    lookup: dict[str, Acceptance] = field(default_factory=dict)
    rates: Rates | None = None  # what was timed; None: nothing, or it is resumed
    spent: float = 0.0  # seconds until that was done
    sized: dict[str, Any] = field(default_factory=dict)  # options made smaller

    def whole(self, prompts: list[Any]) -> TrainingResult:
        """Run all phases, those that an earlier run has not done."""
        fingerprint = target_hash(self.folder)
        fixed = {**self.options.fixed(), "target": fingerprint}
        progress = read_progress(self.out / RUN, fixed)
        if progress is None:
            self.reports.phase("checking what is to be trained")
            check_trainee(self.options, self.model, self.tokenizer, self.folder)
            self._fit()
        else:
            self.options = replace(self.options, **progress.sized)
        if not self.options.data_only:
            try_outputs(self.out, self.reports.say)
        self.reports.phase("dialogues")
        dialogues = self._dialogues(fingerprint, prompts, progress)
        if self.options.data_only:
            files = (self.options.data or [])[1:]
            said = described(dialogues, dialogues.training, files)
            return TrainingResult(self.out, "data", {"data": said})
        learned = dialogues.training
        if progress is not None:
            learned = learned[: progress.dialogues]
        trainee = self._made(learned, [] if progress is None else progress.ids)
        stepper, target, depths = self._stepper(trainee)
        batches = RowBatches(
            learned,
            self.options.rows,
            self.options.slots,
            depths + trainee.first - 1,
            self.options.seed,
            self.options.drafted_slots,
            trainee.first,
        )
        evaluated = self._evaluated_dialogues(dialogues)
        self.reports.phase("lookups on held-out text")
        self.lookup = lookup_acceptance(evaluated)
        fresh = progress is None
        if progress is None:
            steps = self._planned(stepper, batches)
            ids = [] if trainee.ids is None else np.array(trainee.ids).tolist()
            progress = Progress(steps, len(learned), ids, sized=self.sized)
        optimizer = self._optimizer(trainee, progress, fresh)
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

    def _optimizer(self, trainee: Trainee, progress: Progress, fresh: bool) -> Any:
        """Return the optimizer, new or as an earlier run left it, with its weights."""
        optimizer = new_optimizer(
            learning_rate(self.options, self._number("hidden_size", 1024)),
            progress.steps,
            self.options.warmup,
            self.options.weight_decay,
        )
        if fresh:
            optimizer.init(trainee.module.trainable_parameters())
        else:
            load_state(self.out / RUN, trainee.module, optimizer)
        return optimizer

    def _made(self, learned: list[Any], ids: list[int]) -> Trainee:
        return make_trainee(
            self.options,
            self.model,
            self.tokenizer,
            self.folder,
            learned=learned,
            ids=ids,
        )

    def _stepper(self, trainee: Trainee) -> tuple[TrainingStep, TargetModel, int]:
        """Return what takes steps, the teacher, and how many tokens are drafted."""
        depths = depths_of(trainee, self.options.unrolled)
        target = TargetModel(self.model, trainee)
        dtype = mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16
        checkpoint = self._checkpoint(trainee, depths, dtype)
        stepper = TrainingStep(trainee, target, depths, dtype, checkpoint=checkpoint)
        return stepper, target, depths

    def _fit(self) -> None:
        """Make the options smaller where the minutes are too few for them.

        Raises:
            InvalidRequestError: they are too few for any training.
        """
        options = self.options
        if options.minutes is None or options.data_only:
            return
        seconds = 60 * options.minutes
        width = logit_width(self.model)
        count = min(options.vocabulary or width, width)
        self.reports.phase("timing a step")
        trainee = self._made([], list(range(count)))
        stepper, _, depths = self._stepper(trainee)

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
        self.rates = rates_of(self.model, position, options.batch)
        self.spent = time.monotonic() - self.began
        left = seconds - self.spent
        self.options = sized(options, self.rates, left, self.spent)
        self.sized = changed(options, self.options)
        if self.sized:
            made = ", ".join(f"{name} {value}" for name, value in self.sized.items())
            self.reports.say(f"made smaller for {options.minutes:g} minutes: {made}")
        mx.clear_cache()

    def _evaluated_dialogues(self, dialogues: Dialogues) -> list[Any]:
        """Return the held-out dialogues that there is time for, of both kinds."""
        chosen = dialogues.held_out[: self.options.held_out]
        if self.rates is None or self.options.minutes is None:
            return chosen
        count = evaluated(self.options, self.rates, 60 * self.options.minutes)
        greedy = [each for each in chosen if not each.temperature]
        sampled = [each for each in chosen if each.temperature]
        return [*greedy[: -(-count // 2)], *sampled[: max(1, count // 2)]]

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
        options = self.options  # a few slots may not hold a prompt and its answer
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
            Watch(self.reports.step, self.reports.evaluated),
            self.options.accumulate,
            max(1, progress.steps // self._evaluations()),
            self.options.patience,
            self._deadline(_STEPS_END),
            phase=self.reports.phase,
        )
        if self.rates is not None:
            loop.took["step"] = step_seconds(self.options, self.rates)
        return loop

    def _evaluations(self) -> int:
        """Return how many evaluations there are to be."""
        wanted = self.options.evaluations
        return wanted if self.rates is None else min(wanted, _MOST_EVALUATIONS)

    def _dialogues(
        self, fingerprint: str, prompts: list[Any], progress: Progress | None
    ) -> Dialogues:
        path = self.out / RUN / "dialogues.safetensors"
        file, *more = self.options.data or [path]
        dialogues = Dialogues.open(file, fingerprint, more)
        collector = Collector(self.model, self.tokenizer, self.options, prompts)
        share = 1.0 if self.options.data_only else _DATA_SHARE
        until = self._deadline(1.0 if self.options.data_only else _DATA_END)
        if progress is None:
            try:
                collector.fill(
                    dialogues,
                    self.reports.data,
                    self._running_out(share),
                    lambda: until is not None and time.monotonic() > until,
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

    def _running_out(self, share: float) -> Callable[[], bool]:
        """Return what says whether another batch as the last one takes too long."""
        last = time.monotonic()

        def stop() -> bool:
            nonlocal last
            now = time.monotonic()
            took, last = now - last, now
            until = self._deadline(share)
            return until is not None and now + took > until

        return stop

    def _number(self, key: str, default: int) -> int:
        """Return a number in the target's config.json."""
        return int(text_config(read_config(self.folder)).get(key) or default)

    def _checkpoint(self, trainee: Trainee, depths: int, dtype: mx.Dtype) -> bool:
        options = self.options
        dim = self._number("hidden_size", 1024)
        width = logit_width(self.model)
        shape = BatchShape(
            tokens=options.rows * options.slots,
            slots=options.slots,
            dim=dim,
            heads=self._number("num_attention_heads", max(1, dim // 64)),
            ids=width if trainee.ids is None else trainee.ids.size,
            vocab=width,
            depths=depths,
            item=dtype.size,
            blocks=options.drafted_slots,
            layers=options.draft_layers or BLOCK_LAYERS,
        )
        checkpoint, needed = choose_checkpoint(
            self.model, trainee.module, shape, options.checkpoint, options.memory_gb
        )
        again = ", each depth computed again" if checkpoint else ""
        self.reports.say(f"about {needed / 1e9:.1f} GB of memory{again}")
        return checkpoint

    def _planned(self, stepper: TrainingStep, batches: RowBatches) -> int:
        """Return how many steps to take."""
        options = self.options
        if options.steps is not None:
            return options.steps
        if options.minutes is None:
            return max(1, round(options.epochs * batches.per_pass / options.accumulate))
        self.reports.phase("timing a step")
        seconds = stepper.seconds(batches) * options.accumulate
        end = self._deadline(_STEPS_END)
        assert end is not None
        return max(1, int(_STEP_SHARE * (end - time.monotonic()) / seconds))

    def _deadline(self, share: float = 1.0) -> float | None:
        """Return when a share of the minutes after timing is over; None: never."""
        minutes = self.options.minutes
        if minutes is None:
            return None
        return self.began + self.spent + (60 * minutes - self.spent) * share

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
        data = described(dialogues, learned, (self.options.data or [])[1:])
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

        written = record(None)  # before what may fail or be interrupted
        speeds, pairing = None, ""
        trained = ended in ("steps", "stale", "time") and progress.best[1]
        if trained and not self.options.skip_speed:
            self.reports.phase("measuring speeds")
            speeds, pairing = measured(
                self.model,
                self.tokenizer,
                trainee,
                evaluated,
                self.folder,
                self.out,
                self._deadline(),
            )
            written = record(speeds)
        return TrainingResult(self.out, ended, written, speeds, pairing)

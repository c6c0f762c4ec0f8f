"""A training from beginning to end: data, steps, and the files that it writes.

OUT/                    the draft, ready to be loaded; training.json, README.md
OUT/run/                dialogues.safetensors, state.json, state-*.safetensors
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import (
    check_target,
    load,
    logit_width,
    model_folder,
    read_config,
)
from mlx_speculation.models.config_json import text_config
from mlx_speculation.models.mtp.fingerprints import target_hash
from mlx_speculation.training.acceptance_check import (
    check_acceptance,
    lookup_acceptance,
)
from mlx_speculation.training.data.collect import Collector
from mlx_speculation.training.data.dialogues import Dialogue, Dialogues
from mlx_speculation.training.data.draft_ids import coverage
from mlx_speculation.training.data.prompts import Messages, read_prompts
from mlx_speculation.training.data.row_batches import RowBatches
from mlx_speculation.training.kinds.choose_trainee import (
    check_trainee,
    learning_rate,
    make_trainee,
)
from mlx_speculation.training.kinds.trainee import Trainee
from mlx_speculation.training.loop import Reports, TrainingLoop
from mlx_speculation.training.memory_estimate import choose_checkpoint, memory_limit
from mlx_speculation.training.options import TrainOptions
from mlx_speculation.training.output.curves import PLOT, draw_curves
from mlx_speculation.training.output.record import RECORD, described, write_record
from mlx_speculation.training.output.speeds import Speeds, measured, pair_with
from mlx_speculation.training.plan import (
    DATA_END,
    DATA_SHARE,
    STEPS_END,
    TRIAL,
    Rates,
    Schedule,
    Sizes,
    made_up,
    position_seconds,
    step_seconds,
    token_seconds,
)
from mlx_speculation.training.state import Progress, load_state, read_progress
from mlx_speculation.training.step import TrainingStep, new_optimizer
from mlx_speculation.training.teacher import TargetModel

RUN = "run"


@dataclass(slots=True)
class TrainingResult:
    """Result of a training."""

    folder: Path  # of the draft
    ended: str  # "steps", "stale", "time", "interrupt", or "data" (with `data_only`)
    record: dict[str, Any]  # training.json; after "data" only its entry "data"
    speeds: Speeds | None = None  # None: not measured
    pairing: str = ""  # how speculation.json was changed, or why it was not


def train(
    target: str | Path,
    out: Path,
    options: TrainOptions,
    *,
    reports: Reports | None = None,
    trust_remote_code: bool = False,
) -> TrainingResult:
    """Train a draft for a target, or resume a training that was interrupted.

    `target` is a folder or repository. `out` is the draft's folder, which is made if it
    does not exist. With `trust_remote_code` code in the target's folder can run.

    Raises:
        InvalidRequestError: an option is out of range, `out` holds other files, there
            are no prompts, the memory is not enough, or a resumed training had other
            options.
        ModelFolderError: the target cannot be loaded, or has no MTP head to train.
        UnsupportedModelError: the target lacks a layer or state that the draft reads.
    """
    schedule = Schedule(options.minutes, time.monotonic())
    options.check()
    check_folder(out)
    prompts = [] if options.prompts is None else read_prompts(options.prompts)
    check_target(target)
    folder = model_folder(target)
    # A record may be published, so it contains no paths.
    name = folder.resolve().name if Path(target).is_dir() else str(target)
    with memory_limit(options.memory_gb):
        model, tokenizer = load(folder, trust_remote_code=trust_remote_code)
        reports = reports or Reports()
        run = Run(name, folder, model, tokenizer, options, out, reports, schedule)
        return run.whole(prompts)


def check_folder(out: Path) -> None:
    """Refuse a folder unless it is new, empty or of a training."""
    if not out.exists():
        return
    if not out.is_dir():
        raise InvalidRequestError(
            f"{str(out)!r} is a file. Name a folder for the draft."
        )
    present = sorted(each.name for each in out.iterdir())
    if present and RUN not in present and RECORD not in present:
        raise InvalidRequestError(
            f"{str(out)!r} holds {present[0]!r}, but no training. Name a new folder."
        )


def try_folder(out: Path) -> None:
    """Make a folder, and refuse it if it cannot be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise InvalidRequestError(
            f"{str(out)!r} cannot be written ({error.strerror}). Name another "
            "folder for the draft."
        ) from error


@dataclass(slots=True)
class Run:
    """One training; `whole` runs it."""

    name: str  # of the target
    folder: Path  # of the target
    model: nn.Module
    tokenizer: Any
    options: TrainOptions  # some are reduced if the time is short
    out: Path  # the draft's folder
    reports: Reports
    schedule: Schedule

    def whole(self, prompts: list[Messages]) -> TrainingResult:
        """Run the phases that an earlier run has not completed."""
        fingerprint = target_hash(self.folder)
        fixed = {**self.options.fixed(), "target": fingerprint}
        progress = read_progress(self.out / RUN, fixed) or Progress()
        fresh = not progress.steps
        if fresh:
            self.reports.phase("checking what is to be trained")
            check_trainee(self.options, self.model, self.tokenizer, self.folder)
            progress.sized = self._fit()
        self.options = replace(self.options, **progress.sized)
        if not self.options.data_only:
            try_folder(self.out)
        self.reports.phase("dialogues")
        dialogues = self._dialogues(fingerprint, prompts, fresh=fresh)
        learned = dialogues.training[: progress.dialogues or None]
        data = described(dialogues, learned, (self.options.data or [])[1:])
        if self.options.data_only:
            return TrainingResult(self.out, "data", {"data": data})
        evaluated = self.schedule.evaluated(self.options, dialogues.held_out)
        self.reports.phase("lookups on held-out text")
        lookup = lookup_acceptance(evaluated)
        loop = self._loop(fixed, learned, progress, evaluated)
        trainee, ended = loop.trainee, loop.run()
        if not progress.step and ended == "time":
            raise InvalidRequestError(
                f"The {self.options.minutes:g} minutes are over, and no step was taken "
                f"yet; {len(learned)} dialogues are kept in {dialogues.file}. The same "
                "command with more --minutes goes on from there."
            )
        if trainee.ids is not None:
            covered = coverage(dialogues.held_out, np.array(trainee.ids))
            data["coverage"] = round(covered, 4)
        draw_curves(self.out / PLOT, progress, lookup, self.reports.say)
        write = partial(
            write_record, self.out, self.name, fixed, progress, data, lookup, ended
        )
        written = write(None)  # before measuring, which may fail or be interrupted
        speeds, pairing = None, ""
        trained = ended != "interrupt" and progress.best[1]
        if trained and not self.options.skip_speed:
            self.reports.phase("measuring speeds")
            speeds, pairing = self._measured(trainee.kind, dialogues)
            written = write(speeds)
        return TrainingResult(self.out, ended, written, speeds, pairing)

    def _fit(self) -> Sizes:
        """Measure steps and dialogues; return options reduced to fit the minutes."""
        options = self.options
        if options.minutes is None or options.data_only:
            return {}
        width = logit_width(self.model)
        ids = range(min(options.vocabulary or width, width))
        self.reports.phase("timing a step")
        trainee = make_trainee(
            options, self.model, self.tokenizer, self.folder, [], ids
        )
        stepper = self._stepper(trainee)

        def run(rows: int, slots: int) -> float:
            text = made_up(width, rows * slots)
            return stepper.seconds(self._batches(trainee, [text], rows, slots))

        most = TRIAL * 60 * options.minutes
        position = position_seconds(run, options.rows, options.slots, most)
        self.reports.phase("timing dialogues")
        one, many = (token_seconds(self.model, n) for n in (1, options.batch))
        rates = Rates(position, one, many, options.batch)
        sizes = self.schedule.fit(options, rates)
        if sizes:
            made = ", ".join(f"{name} {value}" for name, value in sizes.items())
            self.reports.say(f"reduced to fit into {options.minutes:g} minutes: {made}")
        mx.clear_cache()
        return sizes

    def _dialogues(
        self, fingerprint: str, prompts: list[Messages], *, fresh: bool
    ) -> Dialogues:
        """Return the dialogues; if the training is new, collect what is missing."""
        path = self.out / RUN / "dialogues.safetensors"
        file, *more = self.options.data or [path]
        dialogues = Dialogues.open(file, fingerprint, more)
        collector = Collector(self.model, self.tokenizer, self.options, prompts)
        share, end = DATA_SHARE, DATA_END
        if self.options.data_only:
            share = end = 1.0
        if fresh:
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

    def _loop(
        self,
        fixed: dict[str, Any],
        learned: Sequence[Dialogue],
        progress: Progress,
        evaluated: Sequence[Dialogue],
    ) -> TrainingLoop:
        """Return the loop with a drafter, new or as saved."""
        options, state = self.options, self.out / RUN
        trainee = make_trainee(
            options, self.model, self.tokenizer, self.folder, learned, progress.ids
        )
        stepper = self._stepper(trainee)
        batches = self._batches(trainee, learned, options.rows, options.slots)
        fresh = not progress.steps
        if fresh:
            progress.steps = self._steps(stepper, batches)
            progress.dialogues = len(learned)
            progress.ids = [] if trainee.ids is None else np.array(trainee.ids).tolist()
        rate = learning_rate(options, self._config.get("hidden_size") or 1024)
        optimizer = new_optimizer(
            rate, progress.steps, options.warmup, options.weight_decay
        )
        if fresh:
            optimizer.init(trainee.module.trainable_parameters())
        else:
            load_state(state, trainee.module, optimizer)
        self.reports.say(
            f"{progress.step} of {progress.steps} steps are done, each of "
            f"{options.rows * options.accumulate} rows of {options.slots} slots; "
            f"{len(learned)} dialogues, {batches.per_pass} batches a pass"
        )
        # A prompt and its answer can be longer than the slots.
        longest = max(options.slots, options.prompt_tokens + options.answer_tokens)
        longest += trainee.depths(options.unrolled)
        rates = self.schedule.rates
        return TrainingLoop(
            options,
            fixed,
            trainee,
            stepper,
            optimizer,
            batches,
            progress,
            state,
            partial(check_acceptance, trainee, stepper.target, evaluated, longest),
            partial(trainee.save, self.out, options.bits),
            self.reports,
            max(1, progress.steps // self.schedule.evaluations(options)),
            self.schedule.deadline(STEPS_END),
            0.0 if rates is None else step_seconds(options, rates),
        )

    def _steps(self, stepper: TrainingStep, batches: RowBatches) -> int:
        options = self.options
        if options.steps is not None:
            return options.steps
        if options.minutes is None:
            return max(1, round(options.epochs * batches.per_pass / options.accumulate))
        self.reports.phase("timing a step")
        return self.schedule.steps(stepper.seconds(batches) * options.accumulate)

    def _stepper(self, trainee: Trainee) -> TrainingStep:
        """Return the training step, with gradient checkpointing if memory is short."""
        dtype = mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16
        checkpoint, needed = choose_checkpoint(
            self.options, self.model, trainee, self._config, dtype.size
        )
        again = ", with gradient checkpointing" if checkpoint else ""
        self.reports.say(f"about {needed / 1e9:.1f} GB of memory{again}")
        target = TargetModel(self.model, trainee)
        depths = trainee.depths(self.options.unrolled)
        return TrainingStep(trainee, target, depths, dtype, checkpoint=checkpoint)

    def _batches(
        self, trainee: Trainee, texts: Sequence[Dialogue], rows: int, slots: int
    ) -> RowBatches:
        options, first = self.options, trainee.first
        more = trainee.depths(options.unrolled) + first - 1
        return RowBatches(
            texts, rows, slots, more, options.seed, options.drafted_slots, first
        )

    def _measured(self, kind: str, dialogues: Dialogues) -> tuple[Speeds | None, str]:
        """Return the speeds; if the draft pays, name it in speculation.json."""
        speeds, refusal = measured(
            self.model,
            self.tokenizer,
            self.out,
            dialogues.held_out,
            self.schedule.deadline(),
        )
        name = "model" if kind == "draft" else kind
        return speeds, refusal or pair_with(self.folder, self.out, name)

    @property
    def _config(self) -> dict[str, Any]:
        return text_config(read_config(self.folder))

"""A training from beginning to end: data, steps, and what is left of it.

OUT/                    the draft, as engines load it; training.json, README.md
OUT/run/                dialogues.safetensors, state.json, state-*.safetensors
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_speculation.errors import ConventionError, InvalidRequestError
from mlx_speculation.models import (
    load,
    logit_width,
    model_folder,
    read_config,
)
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
from mlx_speculation.training.data.prompts import read_prompts
from mlx_speculation.training.data.row_batches import RowBatches
from mlx_speculation.training.kinds.choose_trainee import (
    check_trainee,
    learning_rate,
    make_trainee,
)
from mlx_speculation.training.kinds.trainee import Trainee, depths_of
from mlx_speculation.training.loop import TrainingLoop, Watch
from mlx_speculation.training.memory_estimate import (
    BatchShape,
    choose_checkpoint,
    memory_limit,
)
from mlx_speculation.training.options import BLOCK_LAYERS, TrainOptions
from mlx_speculation.training.output.curves import PLOT, draw_curves
from mlx_speculation.training.output.pair_file import pair_with
from mlx_speculation.training.output.record import RECORD, write_record
from mlx_speculation.training.output.speeds import Speeds, measure_speeds
from mlx_speculation.training.state import Progress, load_state, read_progress
from mlx_speculation.training.step import TrainingStep, new_optimizer
from mlx_speculation.training.teacher import TargetModel

RUN = "run"
_DATA_SHARE = 0.4  # of the minutes, at most
_STEP_SHARE = 0.85  # of the minutes that are left, for steps
_EVALUATED_ROWS = 16


@dataclass(slots=True)
class TrainingResult:
    """What a training has come to.

    Attributes:
        folder: the draft's.
        ended: "steps", "stale", "time", "interrupt", or "data": no step was wanted.
        record: what training.json holds; of "data" what is said of them alone.
        speeds: measured here; None: they were not.
        pairing: what was done about speculation.json.
    """

    folder: Path
    ended: str
    record: dict[str, Any]
    speeds: Speeds | None = None
    pairing: str = ""


@dataclass(slots=True)
class Reports:
    """Who is told what a training does; by default nobody.

    Attributes:
        say: called with a line.
        data: called with how many dialogues there are, of how many.
        step: called with the progress and the newest mean loss.
        evaluated: called with the progress after each evaluation.
    """

    say: Callable[[str], None] = lambda line: None
    data: Callable[[int, int], None] = lambda done, whole: None
    step: Callable[[Progress, float], None] = lambda progress, loss: None
    evaluated: Callable[[Progress], None] = lambda progress: None


def train(
    target: str | Path,
    out: Path,
    options: TrainOptions,
    *,
    reports: Reports | None = None,
    trust_remote_code: bool = False,
) -> TrainingResult:
    """Train a draft for a target, or resume a training that was interrupted.

    Args:
        target: folder or repository of the target.
        out: the draft's folder; it is made.
        options: of the training.
        reports: who is told.
        trust_remote_code: let code in the target's folder run.

    Raises:
        InvalidRequestError: an option is out of range, `out` holds something else,
            there are no prompts, the memory is not enough, or a resumed training had
            other options.
        ModelFolderError: the target cannot be loaded, or has no MTP head to train.
        UnsupportedModelError: the target does not show what the draft reads.
    """
    began = time.monotonic()
    options.check()
    check_folder(out)
    prompts = [] if options.prompts is None else read_prompts(options.prompts)
    folder = model_folder(target)
    # A record may be published: it names folders without where they lie here.
    name = folder.resolve().name if Path(target).is_dir() else str(target)
    with memory_limit(options.memory_gb):
        model, tokenizer = load(folder, trust_remote_code=trust_remote_code)
        run = _Run(
            name, folder, model, tokenizer, out, options, reports or Reports(), began
        )
        return run.whole(prompts)


def check_folder(out: Path) -> None:
    """Refuse a folder that holds something else than a training.

    Raises:
        InvalidRequestError: it does.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise InvalidRequestError(
            f"{str(out)!r} is a file. Name a folder for the draft."
        )
    held = sorted(each.name for each in out.iterdir())
    if held and RUN not in held and RECORD not in held:
        raise InvalidRequestError(
            f"{str(out)!r} holds {held[0]!r} and no training. Name a new folder."
        )


@dataclass(slots=True)
class _Run:
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

    def whole(self, prompts: list[Any]) -> TrainingResult:
        fingerprint = target_hash(self.folder)
        fixed = {**self.options.fixed(), "target": fingerprint}
        progress = read_progress(self.out / RUN, fixed)
        if progress is None:
            check_trainee(self.options, self.model, self.tokenizer, self.folder)
        dialogues = self._dialogues(fingerprint, prompts, progress)
        if self.options.data_only:
            said = self._described(dialogues, dialogues.training)
            return TrainingResult(self.out, "data", {"data": said})
        learned = dialogues.training
        if progress is not None:
            learned = learned[: progress.dialogues]
        trainee = make_trainee(
            self.options,
            self.model,
            self.tokenizer,
            self.folder,
            learned=learned,
            ids=[] if progress is None else progress.ids,
        )
        depths = depths_of(trainee, self.options.unrolled)
        target = TargetModel(self.model, trainee)
        dtype = mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16
        stepper = TrainingStep(
            trainee,
            target,
            depths,
            dtype,
            checkpoint=self._checkpoint(trainee, depths, dtype),
        )
        batches = RowBatches(
            learned,
            self.options.rows,
            self.options.slots,
            depths + trainee.first - 1,
            self.options.seed,
            self.options.drafted_slots,
            trainee.first,
        )
        fresh = progress is None
        if progress is None:
            steps = self._planned(stepper, batches)
            ids = [] if trainee.ids is None else np.array(trainee.ids).tolist()
            progress = Progress(steps, len(learned), ids)
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
        self.out.mkdir(parents=True, exist_ok=True)
        held = dialogues.held_out[: self.options.held_out]
        longest = self.options.slots + depths
        self.lookup = lookup_acceptance(held)
        loop = TrainingLoop(
            trainee,
            stepper,
            optimizer,
            batches,
            progress,
            fixed,
            self.out / RUN,
            lambda: check_acceptance(
                trainee, target, held, rows=_EVALUATED_ROWS, longest=longest
            ),
            lambda: trainee.save(self.out, self.options.bits),
            Watch(self.reports.step, self.reports.evaluated),
            self.options.accumulate,
            max(1, progress.steps // self.options.evaluations),
            self.options.patience,
            self._deadline(),
        )
        self.reports.say(
            f"{progress.steps} steps of {self.options.rows * self.options.accumulate} "
            f"rows of {self.options.slots}, {progress.step} of them taken; "
            f"{len(learned)} dialogues, {batches.per_pass} batches a pass"
        )
        ended = loop.run()
        return self._finished(trainee, dialogues, learned, progress, fixed, ended)

    def _dialogues(
        self, fingerprint: str, prompts: list[Any], progress: Progress | None
    ) -> Dialogues:
        own = self.out / RUN / "dialogues.safetensors"
        file, *more = self.options.data or [own]
        dialogues = Dialogues.open(file, fingerprint, more)
        collector = Collector(self.model, self.tokenizer, self.options, prompts)
        share = 1.0 if self.options.data_only else _DATA_SHARE
        if progress is None:
            try:
                collector.fill(dialogues, self.reports.data, self._running_out(share))
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
        asked = time.monotonic()

        def stop() -> bool:
            nonlocal asked
            now = time.monotonic()
            took, asked = now - asked, now
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
        seconds = stepper.seconds(batches) * options.accumulate
        left = self.began + 60 * options.minutes - time.monotonic()
        return max(10, int(_STEP_SHARE * left / seconds))

    def _deadline(self, share: float = 1.0) -> float | None:
        minutes = self.options.minutes
        return None if minutes is None else self.began + 60 * minutes * share

    def _finished(
        self,
        trainee: Trainee,
        dialogues: Dialogues,
        learned: list[Any],
        progress: Progress,
        fixed: dict[str, Any],
        ended: str,
    ) -> TrainingResult:
        held = dialogues.held_out
        data = self._described(dialogues, learned)
        if trainee.ids is not None:
            ids = np.array(trainee.ids)
            data["coverage"] = round(coverage(held, ids), 4)
        speeds, pairing = None, ""
        if not self.options.skip_speed and ended in ("steps", "stale"):
            speeds, pairing = self._measured(trainee, held)
        draw_curves(self.out / PLOT, progress, self.lookup)
        record = write_record(
            self.out,
            target=self.name,
            options=fixed,
            progress=progress,
            data=data,
            lookup=self.lookup,
            speeds=speeds,
            ended=ended,
        )
        return TrainingResult(self.out, ended, record, speeds, pairing)

    def _described(self, dialogues: Dialogues, learned: list[Any]) -> dict[str, Any]:
        """Return what the record says of the data."""
        return {
            "file": dialogues.file.name,
            "more": [file.name for file in (self.options.data or [])[1:]],
            "dialogues": len(learned),
            "own": sum(each.own for each in learned),
            "tokens": sum(len(each.tokens) for each in learned),
            "learned": int(sum(each.counts.sum() for each in learned)),
            "held_out": len(dialogues.held_out),
        }

    def _measured(self, trainee: Trainee, held: list[Any]) -> tuple[Speeds | None, str]:
        """Measure speeds, and name the draft in speculation.json if it pays."""
        source = trainee.source(self.out)
        try:
            speeds = measure_speeds(self.model, self.tokenizer, source, held)
        except ConventionError as error:  # it has learned next to nothing
            return None, f"It drafts no better than by chance. {error}"
        if not speeds.pays:
            return speeds, "It does not pay here, so speculation.json does not name it."
        kind = "model" if trainee.kind == "draft" else trainee.kind
        return speeds, pair_with(self.folder, self.out, kind)

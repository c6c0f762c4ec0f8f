"""A training from beginning to end: data, steps, and the files that it writes.

OUT/                    the draft, ready to be loaded; training.json, README.md
OUT/run/                dialogues.safetensors, state.json, state-*.safetensors
"""

import time
from pathlib import Path

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import check_target, load, model_folder
from mlx_speculation.training.data.prompts import read_prompts
from mlx_speculation.training.loop import Reports
from mlx_speculation.training.memory_estimate import memory_limit
from mlx_speculation.training.options import TrainOptions
from mlx_speculation.training.output.record import RECORD
from mlx_speculation.training.phases import RUN, Run, Setup
from mlx_speculation.training.plan import Schedule
from mlx_speculation.training.reports import TrainingResult


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
        out: the draft's folder; made if it does not exist.
        options: the options of the training.
        reports: callbacks for progress; None: progress is not reported.
        trust_remote_code: whether code in the target's folder may run.

    Raises:
        InvalidRequestError: an option is out of range, `out` holds other files, there
            are no prompts, the memory is not enough, or a resumed training had other
            options.
        ModelFolderError: the target cannot be loaded, or has no MTP head to train.
        UnsupportedModelError: the target lacks a layer or state that the draft reads.
    """
    began = time.monotonic()
    options.check()
    check_folder(out)
    prompts = [] if options.prompts is None else read_prompts(options.prompts)
    check_target(target)
    folder = model_folder(target)
    # A record may be published, so it does not contain the paths of folders.
    name = folder.resolve().name if Path(target).is_dir() else str(target)
    with memory_limit(options.memory_gb):
        model, tokenizer = load(folder, trust_remote_code=trust_remote_code)
        reports = reports or Reports()
        setup = Setup(folder, model, tokenizer, options, reports.say)
        run = Run(name, setup, out, reports, Schedule(options.minutes, began))
        return run.whole(prompts)


def check_folder(out: Path) -> None:
    """Refuse a folder that holds other files than those of a training.

    Raises:
        InvalidRequestError: the folder holds other files, or is itself a file.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise InvalidRequestError(
            f"{str(out)!r} is a file. Name a folder for the draft."
        )
    present = sorted(each.name for each in out.iterdir())
    if present and RUN not in present and RECORD not in present:
        raise InvalidRequestError(
            f"{str(out)!r} holds {present[0]!r} and no training. Name a new folder."
        )

"""A training from beginning to end: data, steps, and what is left of it.

OUT/                    the draft, as engines load it; training.json, README.md
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
    check_target(target)
    folder = model_folder(target)
    # A record may be published: it names folders without where they lie here.
    name = folder.resolve().name if Path(target).is_dir() else str(target)
    with memory_limit(options.memory_gb):
        model, tokenizer = load(folder, trust_remote_code=trust_remote_code)
        reports = reports or Reports()
        setup = Setup(folder, model, tokenizer, options, reports.say)
        run = Run(name, setup, out, reports, Schedule(options.minutes, began))
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
    present = sorted(each.name for each in out.iterdir())
    if present and RUN not in present and RECORD not in present:
        raise InvalidRequestError(
            f"{str(out)!r} holds {present[0]!r} and no training. Name a new folder."
        )

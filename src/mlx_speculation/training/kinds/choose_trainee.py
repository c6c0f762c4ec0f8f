"""Choice of a trainee and its learning rate from the options."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np

from mlx_speculation.models import find_parts, logit_width, read_config
from mlx_speculation.models.mtp import find_mtp_head
from mlx_speculation.training.data.dialogues import Dialogue
from mlx_speculation.training.data.draft_ids import choose_ids, needed_ids
from mlx_speculation.training.kinds.block_drafter import BlockTrainee, mask_id
from mlx_speculation.training.kinds.eagle_head import EagleTrainee
from mlx_speculation.training.kinds.mtp_head import MtpTrainee
from mlx_speculation.training.kinds.small_model import SmallModelTrainee
from mlx_speculation.training.kinds.trainee import Trainee
from mlx_speculation.training.options import TrainOptions

_RATES = {"mtp": 1e-4, "draft": 3e-4}


def make_trainee(
    options: TrainOptions,
    model: nn.Module,
    tokenizer: Any,
    folder: Path,
    learned: Sequence[Dialogue],
    ids: Sequence[int],
) -> Trainee:
    """Return the drafter to train, with its initial weights.

    A new head drafts `ids`; empty: the ids are chosen from the dialogues `learned`.
    """
    if options.kind == "mtp":
        return MtpTrainee(model, tokenizer, folder)
    if options.kind == "draft":
        assert options.draft_model is not None
        draft = options.draft_model
        return SmallModelTrainee(model, tokenizer, folder, draft, options.seed)
    width, size, config = logit_width(model), options.vocabulary, read_config(folder)
    chosen = np.array(ids, np.int64)
    if not len(ids):
        chosen = choose_ids(learned, size or width, width, needed_ids(tokenizer))
    if options.blocks:
        mask = mask_id(tokenizer, width)
        some = chosen if size else None
        return BlockTrainee(options, model, config, some, mask)
    return EagleTrainee(model, config, chosen, options.layers, options.seed)


def check_trainee(
    options: TrainOptions, model: nn.Module, tokenizer: Any, folder: Path
) -> None:
    """Check that a trainee can be made.

    Raises:
        InvalidRequestError: `options.layers` names a layer twice, or one that the
            target lacks.
        ModelFolderError: the draft cannot be made, or the target has no MTP head.
        TokenizerMismatchError: the draft has other token ids.
        UnsupportedModelError: the target lacks a part that the draft reads, or the
            draft is quantized.
    """
    if options.kind == "mtp":  # no trainee is made, since making it runs a probe
        find_parts(model).require("layers", "norm", "embedding")
        find_mtp_head(folder, model)
    else:
        make_trainee(options, model, tokenizer, folder, [], [0])


def learning_rate(options: TrainOptions, dim: int) -> float:
    """Return the peak learning rate.

    The rate of a new head falls with the hidden size `dim`: 1.5e-3 at 576 is measured,
    1e-4 to 2e-4 at 4,096 are usual.
    """
    if options.rate is not None:
        return options.rate
    return _RATES.get(options.kind, min(1.5e-3, 0.85 / dim))

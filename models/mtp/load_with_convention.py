"""Loading an MTP head with the convention that it was trained with.

The convention is taken from the first of these sources that has it:

    1. the caller
    2. the files of an MTPLX pack (see `pack_convention`); if these do not say how norms
       are stored, a probe finds it out
    3. the saved result of an earlier probe of the same target and head
    4. a probe now, whose result is saved
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.utils import load_tokenizer

from mlx_speculation.errors import ModelFolderError
from mlx_speculation.measured_file import MeasuredFile
from mlx_speculation.models.checkpoints.convention import (
    MtpConvention,
    convention_of,
)
from mlx_speculation.models.checkpoints.probe_text import STARTS, OwnText
from mlx_speculation.models.introspect.hidden_states import HiddenStates
from mlx_speculation.models.mtp.convention_probe import HeadProbe, probe
from mlx_speculation.models.mtp.families import family_of, module_of
from mlx_speculation.models.mtp.fingerprints import head_hash, target_hash
from mlx_speculation.models.mtp.head import MtpHead
from mlx_speculation.models.mtp.load import (
    FoundHead,
    build_mtp_head,
    decided,
    find_mtp_head,
)
from mlx_speculation.models.mtp.pack_convention import pack_convention
from mlx_speculation.warn import notice


def load_mtp_head(
    folder: str | Path,
    model: nn.Module,
    *,
    convention: MtpConvention | None = None,
    tokenizer: Any = None,
    split: Path | None = None,
) -> MtpHead:
    """Load the MTP head that belongs to a target.

    `folder` is the target's, and `split` the head's own folder, if it has one. Without
    `convention`, the convention is read from files or probed. In a probe the target
    writes about 64 tokens, and the head guesses them under each possible convention.
    The best one is used and saved. The probe uses `tokenizer`, or the one in the
    folder.

    On a Linux CPU the head is float32, dequantized where it was quantized.

    Raises:
        UnsupportedModelError: no heads are known for the target's family.
        ConventionError: the head agrees with the target under no convention.
        ModelFolderError: the folder has no head, the head is not complete, or
            `convention` was passed without `norms` and the files do not say how norms
            are stored.
    """
    value = find_mtp_head(folder, model, split=split)
    pack = None
    if convention is None and split is None:
        pack = pack_convention(value.folder, value.config)
        convention = pack if value.norms is not None else None
    file = None
    if convention is None:
        file = saved_convention(value)
        convention = file.read(
            lambda saved: convention_of(saved["convention"], str(value.folder))
        )
    if convention is not None or file is None:
        return build_mtp_head(value, model, decided(convention, value))[0]
    head = _probed(value, model, pack, tokenizer)
    _say_mixture(value, head.convention)
    file.write({"convention": asdict(head.convention)})
    return head


def saved_convention(head: FoundHead) -> MeasuredFile:
    """Return the file for the convention of a head on its target."""
    key = {"target": target_hash(head.folder), "head": head_hash(head.files)}
    return MeasuredFile("conventions", 1, key, "The MTP head is probed again.")


def _probed(
    value: FoundHead, model: nn.Module, pack: MtpConvention | None, tokenizer: Any
) -> MtpHead:
    norms = value.norms
    usual = replace(pack or value.family.convention, norms=norms or "stored")
    usual = decided(usual, value)
    head, stored = build_mtp_head(value, model, usual)
    free = ["norms"] if pack is not None or norms is None else []
    if pack is None:
        free += ["order", "hidden"]
        if value.family.depth != 1 and "final" in head.layers[0]:
            free.append("recycled")
    if tokenizer is None:
        tokenizer = _tokenizer(value)
    taps = HiddenStates(model, before_norm=True, after_norm=True)
    try:
        text = OwnText.of(model, taps, [tokenizer.encode(start) for start in STARTS])
        trial = HeadProbe(head, stored, taps, text)
        probe(trial, usual, free, source=value.files.source)
    finally:
        taps.remove()
    return head


def usual_convention(model: nn.Module) -> MtpConvention:
    """Return the usual convention of heads of a target's family."""
    family = family_of(module_of(model))
    return MtpConvention() if family is None else family.convention


def _say_mixture(result: FoundHead, convention: MtpConvention) -> None:
    if isinstance(convention.norms, tuple):
        notice(
            f"In the MTP head in {result.files.source} of {str(result.folder)!r} only "
            f"the norms {', '.join(convention.norms)} seem to be stored as w and "
            "applied as 1 + w: with this form, the head predicts more of the target's "
            "text than with others. Pass convention= to choose another form."
        )


def _tokenizer(result: FoundHead) -> Any:
    try:
        return load_tokenizer(result.folder)
    except Exception as error:
        raise ModelFolderError(
            f"The convention of the MTP head in {result.files.source} has to be probed "
            f"on text, but the tokenizer of {str(result.folder)!r} cannot be read: "
            f"{error}. Pass tokenizer=, or name the convention."
        ) from error

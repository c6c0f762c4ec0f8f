"""Loading an MTP head with the convention that it was trained with.

The first of these sources that has the convention counts:

    1. the caller
    2. the pack's own files; if they do not say how norms are stored, a probe finds that
    3. the saved result of an earlier probe of the same target and head
    4. a probe now, whose result is saved
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.utils import load_tokenizer

from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models.checkpoints.convention import MtpConvention
from mlx_speculation.models.checkpoints.draft_checkpoint import Weights
from mlx_speculation.models.checkpoints.probe import Score
from mlx_speculation.models.checkpoints.probe_text import PASSAGE, STARTS, OwnText
from mlx_speculation.models.introspect.hidden_states import HiddenStates
from mlx_speculation.models.mtp.convention_probe import (
    HeadProbe,
    Probed,
    described,
    probe,
)
from mlx_speculation.models.mtp.convention_store import (
    Pair,
    SavedConventions,
    pack_convention,
)
from mlx_speculation.models.mtp.families import family_of, module_of
from mlx_speculation.models.mtp.fingerprints import head_hash, target_hash
from mlx_speculation.models.mtp.head import MtpHead
from mlx_speculation.models.mtp.load import (
    FoundHead,
    build_mtp_head,
    decided,
    find_mtp_head,
)
from mlx_speculation.models.quantize import runs_on_linux_cpu, to_float32
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

    Args:
        folder: the target's folder.
        model: the target, loaded from it.
        convention: the head's training convention. When omitted, it is read from files
            or probed: the target writes about 64 tokens, the head guesses them by each
            possible convention, and the best one is used and saved.
        tokenizer: the target's, for the probe; read from the folder when omitted.
        split: the head's own folder, if it is not in the target's.

    Returns:
        The head; on a Linux CPU in float32, dequantized where it was quantized.

    Raises:
        UnsupportedModelError: no heads are known for the target's family.
        ConventionError: the head agrees with the target by no convention.
        ModelFolderError: the folder has no head, the head is not complete, or neither
            `convention` nor the files say how norms are stored.
    """
    value = find_mtp_head(folder, model, split=split)
    pack = None
    if convention is None and split is None:
        pack = pack_convention(value.folder, value.config)
        convention = pack if value.norms is not None else None
    if convention is None:
        head_folder = next(iter(value.files.tensors.values())).file.parent
        pair = Pair(target_hash(value.folder), head_hash(value.files))
        saved = SavedConventions(head_folder, pair)
        kept = saved.find()
        convention = None if kept is None else kept[0]
    if convention is not None:
        head, _ = build_mtp_head(value, model, decided(convention, value))
        return _ready(head)
    head, result = _probed(value, model, pack, tokenizer)
    _say_mixture(value, result.convention)
    first, second = _scores(result.first), _scores(result.second)
    saved.save(result.convention, {"first draft": first, "second draft": second})
    return head


def _probed(
    value: FoundHead, model: nn.Module, pack: MtpConvention | None, tokenizer: Any
) -> tuple[MtpHead, Probed]:
    """Return the head with the probed convention, and the result of the probe."""
    norms = value.norms
    usual = replace(pack or value.family.convention, norms=norms or "stored")
    usual = decided(usual, value)
    head, stored = build_mtp_head(value, model, usual)
    head = _ready(head)
    free = free_fields(value, head, norms is not None) if pack is None else ["norms"]
    encode = _encode(value, tokenizer)
    result = probe_mtp_head(
        head,
        stored,
        model,
        [encode(start) for start in STARTS],
        usual,
        free,
        source=value.files.source,
        passage=encode(PASSAGE) if value.family.plus_one else None,
    )
    return head, result


def usual_convention(model: nn.Module) -> MtpConvention:
    """Return the usual convention of heads of a target's family."""
    family = family_of(module_of(model))
    return MtpConvention() if family is None else family.convention


def free_fields(result: FoundHead, head: MtpHead, norms: bool) -> list[str]:
    """Return the fields of a convention that a probe has to find.

    Args:
        result: the head in its folder.
        head: the head.
        norms: whether the files say how norms are stored.
    """
    free = ["order", "hidden"]
    if not norms:
        free.append("norms")
    recycles = result.family.depth is None or result.family.depth > 1
    if recycles and "final" in head.layers[0]:
        free.append("recycled")
    return free


def probe_mtp_head(
    head: MtpHead,
    stored: Weights,  # the weights of its norms as they are stored
    model: nn.Module,  # the target, which is left as it was
    # Token ids of a few texts, for the target to go on with
    starts: Sequence[Sequence[int]],
    # The convention unless another is surely better
    usual: MtpConvention,
    free: Sequence[str],  # the fields that are not known
    *,
    source: str,  # where the head is, for messages
    # Token ids of a text for the target to read; None: norms cannot be mixed
    passage: Sequence[int] | None = None,
) -> Probed:
    """Find the convention of a head, and give it to the head.

    Raises:
        ConventionError: no convention is above chance.
    """
    taps = HiddenStates(model, before_norm=True, after_norm=True)
    try:

        def on(text: OwnText) -> HeadProbe:
            return HeadProbe(head, stored, taps, text)

        def on_passage() -> HeadProbe:
            assert passage is not None
            return on(OwnText.read(model, taps, passage))

        return probe(
            on(OwnText.of(model, taps, starts)),
            usual,
            free,
            source=source,
            on_passage=None if passage is None else on_passage,
        )
    finally:
        taps.remove()


def _say_mixture(result: FoundHead, convention: MtpConvention) -> None:
    """Notify the user if norms have another form than the files say, or two forms."""
    norms = convention.norms
    if isinstance(norms, tuple):
        form = f"as w, applied as 1 + w, for {', '.join(norms)} alone"
    elif result.norms not in (None, norms):
        form = f'all as "{norms}"'
    else:
        return
    notice(
        f"The norms of the MTP head in {result.files.source} of {str(result.folder)!r} "
        f"seem to be stored {form}: so it guesses more of what the target writes. It "
        "is read so; convention= names another form."
    )


def _encode(result: FoundHead, tokenizer: Any) -> Callable[[str], list[int]]:
    """Return the function that makes token ids of a text."""
    if tokenizer is None:
        try:
            tokenizer = load_tokenizer(result.folder)
        except Exception as error:
            raise ModelFolderError(
                f"The convention of the MTP head in {result.files.source} is found on "
                f"text, and {str(result.folder)!r} has no tokenizer that can be read: "
                f"{error}. Pass tokenizer=, or name the convention."
            ) from error
    encode: Callable[[str], list[int]] = tokenizer.encode
    return encode


def _ready(head: MtpHead) -> MtpHead:
    if runs_on_linux_cpu():
        to_float32(head)
    return head


def _scores(scores: Mapping[MtpConvention, Score]) -> dict[str, str]:
    return {f"{described(c)}, recycled {c.recycled}": str(s) for c, s in scores.items()}

"""Reading the MTP head of a target from files into a module, without a probe."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.nn as nn

from mlx_speculation.errors import ModelFolderError, UnsupportedModelError
from mlx_speculation.models.checkpoints.convention import MtpConvention, Norms
from mlx_speculation.models.checkpoints.draft_checkpoint import (
    Weights,
    load_into,
    shapes_of,
)
from mlx_speculation.models.config_json import nested, read_config, text_config
from mlx_speculation.models.mtp.families import (
    FAMILIES,
    arguments_of,
    family_of,
    module_of,
)
from mlx_speculation.models.mtp.family import MtpFamily, without_wrappers
from mlx_speculation.models.mtp.files import HeadFiles, find_head, find_split_head
from mlx_speculation.models.mtp.head import MtpHead, MtpLayer
from mlx_speculation.models.mtp.transforms import norms_of, transformed, with_ones
from mlx_speculation.models.safetensors_layout import header, weight_files

# Values by which converted files say that norms are stored as w and applied as 1 + w.
_PLUS_ONE_FLAGS = ("delta", "delta_plus_one", "mlx_delta")
_FLAG_PLACES = (
    ("mtplx_mtp_norm_encoding",),
    ("mtp_norm_encoding",),
    ("mtplx_mtp_quantization", "norm_encoding"),
)


@dataclass(frozen=True, slots=True)
class FoundHead:
    """A head in a folder, not read yet."""

    folder: Path  # the target's folder
    config: dict[str, Any]  # its config.json
    family: MtpFamily
    trunk: int  # how many layers the target has
    files: HeadFiles
    split: Path | None = None  # the head's own folder, if it has one

    @property
    def norms(self) -> Norms | None:
        """Form in which its norms are stored; None: unknown.

        It is "stored" for families without `plus_one`, and in a head's own folder that
        mlx wrote. Elsewhere it is "plus_one" if a flag says so, or if the checkpoint is
        original. Convolutions [channels, 1, kernel] (Qwen) or names that conversions
        change (Step) show that.
        """
        converted = self.split is not None and _of_mlx(self.split)
        if converted or not self.family.plus_one:
            return "stored"
        said = (nested(self.config, *place) for place in _FLAG_PLACES)
        original = self.files.in_shards and _original(self.folder)
        if original or any(flag in _PLUS_ONE_FLAGS for flag in said):
            return "plus_one"
        return None


def find_mtp_head(
    folder: str | Path, model: nn.Module, *, split: Path | None = None
) -> FoundHead:
    """Find the head of a target in its `folder`, or in the head's own folder, `split`.

    Only headers are read.

    Raises:
        UnsupportedModelError: no heads are known for the target's family.
        ModelFolderError: the folder has no head.
    """
    folder = Path(folder).expanduser()
    family = family_of(module_of(model))
    if family is None:
        raise UnsupportedModelError(
            f"MTP heads of {module_of(model)} are not supported; supported families "
            f"are {', '.join(each.name for each in FAMILIES)}. Choose another drafter."
        )
    config = read_config(folder)
    trunk = len(model.layers)
    if split is None:
        files = find_head(folder, config, family, trunk)
    else:
        files = find_split_head(split, family, trunk)
    return FoundHead(folder, config, family, trunk, files, split)


def build_mtp_head(
    result: FoundHead, model: nn.Module, convention: MtpConvention
) -> tuple[MtpHead, Weights]:
    """Read a head, and return it with its norms' weights as they are stored.

    `convention.norms` must not be None. On a Linux CPU the head is float32.

    Raises:
        ModelFolderError: the head is not complete.
    """
    files, norms = result.files, convention.norms
    assert norms is not None
    head = _build(result.family, convention, arguments_of(model), result.config, files)
    weights = transformed(files.read(), shapes_of(head))
    stored = norms_of(weights)
    name = f"MTP head in {files.source}, of the {result.family.name} family,"
    load_into(
        head,
        weights | with_ones(stored, norms),
        name,
        lambda one: result.family.file_name(one, result.trunk),
    )
    return head, stored


def decided(convention: MtpConvention | None, result: FoundHead) -> MtpConvention:
    """Return a convention, by default the family's, with the form of norms filled in.

    Raises:
        ModelFolderError: the form of norms is unknown, or the family has another form.
    """
    convention, family = convention or result.family.convention, result.family
    norms = convention.norms or result.norms
    if norms is None:
        raise ModelFolderError(
            f"The norms of the MTP head in {result.files.source} of "
            f'{str(result.folder)!r} may be stored as "plus_one" (w, applied as 1 + w) '
            'or "stored" (as they are), and nothing in the folder tells which. Name '
            "the form: convention=MtpConvention(norms=...)."
        )
    if norms != "stored" and not family.plus_one:
        raise ModelFolderError(
            f"The convention has norms={norms!r}, but norms of the {family.name} "
            'family are always "stored". Leave norms out.'
        )
    return replace(convention, norms=norms)


def _of_mlx(folder: Path) -> bool:
    return all(header(file)[1].get("format") == "mlx" for file in weight_files(folder))


def _original(folder: Path) -> bool:
    """Return whether the shards were not converted to mlx."""
    for file in weight_files(folder):
        for name, shape in header(file)[0].items():
            if name.endswith("conv1d.weight") and shape[-1] != 1:
                return True
            core = without_wrappers(name)
            shared = ".share_expert." in core and ".mlp.share_expert." not in core
            if core.startswith("layers.") and (".moe." in core or shared):
                return True
    return False


def _build(
    family: MtpFamily,
    convention: MtpConvention,
    args: Any,
    config: dict[str, Any],
    files: HeadFiles,
) -> MtpHead:
    if family.layers == "one" and files.layers > 1:
        raise ModelFolderError(
            f"The MTP head in {files.source} has {files.layers} layers, but only 1 is "
            f"supported for heads of the {family.name} family. Choose another drafter."
        )
    canonical = [name for name in family.rules.values() if name is not None]
    owns = {name.split(".")[2] for name in canonical}
    layers = []
    for k in range(files.layers):
        try:
            blocks = family.build(args, text_config(config), k)
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise ModelFolderError(
                f"Layer {k} of the MTP head cannot be built from config.json: {error}."
            ) from error
        layers.append(
            MtpLayer(
                args.hidden_size,
                _epsilon(args),
                blocks,
                order=convention.order,
                final="final" in owns,
                output=args.vocab_size if "output" in owns else None,
                embedding=args.vocab_size if "embedding" in owns else None,
            )
        )
    chained = family.layers == "chained"
    return MtpHead(layers, convention, chained=chained, depth=family.depth)


def _epsilon(args: Any) -> float:
    names = ("rms_norm_eps", "layernorm_epsilon", "layer_norm_epsilon")
    return float(next(getattr(args, name) for name in names if hasattr(args, name)))

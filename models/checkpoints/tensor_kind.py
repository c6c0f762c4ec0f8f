"""Kind of the drafter in a folder, by the names of its tensors.

config.json can claim another kind, since later kinds reuse architectures and keys of
earlier ones.
"""

from collections.abc import Iterable
from pathlib import Path

from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models.safetensors_layout import header, weight_files

NAMES = {
    "dflash": "DFlash drafter",
    "dflash2": "DFlash2 drafter",
    "dspark": "DSpark drafter",
    "eagle": "EAGLE-3 head",
    "peagle": "P-EAGLE head",
}
# Prefixes of names that only one kind has; the first that is present decides.
_SIGNS = {
    "candidate_selector.": "dflash2",
    "markov_head.": "dspark",
    "markov_w1.": "dspark",
    "confidence_head.": "dspark",
    "mask_hidden": "peagle",
    "midlayer.hidden_norm.": "eagle",
    "layers.0.hidden_norm.": "eagle",
}
_BLOCKS = {"fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_proj.weight"}


def tensor_names(folder: Path) -> frozenset[str]:
    """Return the names of the tensors in a folder's weight files, without "model.".

    If the files cannot be read, the result is empty, and loading them raises the error.
    """
    names: set[str] = set()
    try:
        for file in weight_files(folder, "*.safetensors"):
            names |= header(file)[0].keys()
    except ModelFolderError:
        return frozenset()
    return frozenset(name.removeprefix("model.") for name in names)


def kind_by_tensors(names: Iterable[str], claimed: str) -> str:
    """Return the kind of drafter that has tensors of these names, without "model.".

    `claimed`, the kind in config.json, is returned if the names do not decide.
    """
    present = set(names)
    for sign, kind in _SIGNS.items():
        if any(name.startswith(sign) for name in present):
            return kind
    # A claimed DSpark drafter is kept: it needs no tensors but those of DFlash. A
    # claimed DFlash2 drafter needs more, but is kept too: its loader raises the error.
    if present >= _BLOCKS and claimed not in ("dflash", "dflash2", "dspark"):
        return "dflash"
    return claimed


def check_kind(names: Iterable[str], kind: str) -> None:
    """Raise `ModelFolderError` for the tensors of another kind of drafter."""
    result = kind_by_tensors(names, kind)
    if result != kind:
        raise ModelFolderError(
            f"The folder was to be loaded as a {NAMES[kind]}, but its tensors are "
            f"those of a {NAMES[result]}. Pass the folder as draft=, which recognizes "
            "its kind."
        )

"""Kind of the drafter in a folder, by the names of its tensors.

config.json may claim another kind: a later one has the architecture of an earlier one,
or the same keys. The parts that only one kind has do not lie.
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
# Beginnings of names that one kind alone has, in the order in which they count.
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
# Drafters of blocks that may have no other tensors than these.
_PLAIN_BLOCKS = ("dflash", "dspark")


def tensor_names(folder: Path) -> frozenset[str]:
    """Return the names of the tensors in the files of a folder that count.

    None where they cannot be read, or do not say which count: loading says so.
    """
    names: set[str] = set()
    try:
        for file in weight_files(folder, "*.safetensors"):
            names |= header(file)[0].keys()
    except ModelFolderError:
        return frozenset()
    return frozenset(name.removeprefix("model.") for name in names)


def kind_by_tensors(names: Iterable[str], claimed: str) -> str:
    """Return the kind of drafter that has tensors of these names.

    Args:
        names: without "model." in front.
        claimed: the kind that config.json says, which counts where the names do not
            tell.
    """
    present = set(names)
    for sign, kind in _SIGNS.items():
        if any(name.startswith(sign) for name in present):
            return kind
    if present >= _BLOCKS and claimed not in (*_PLAIN_BLOCKS, "dflash2"):
        return "dflash"
    return claimed


def check_kind(names: Iterable[str], kind: str) -> None:
    """Refuse tensors that are those of another kind of drafter.

    Raises:
        ModelFolderError: names both kinds.
    """
    result = kind_by_tensors(names, kind)
    if result != kind:
        raise ModelFolderError(
            f"The folder was to be loaded as a {NAMES[kind]}, and its tensors are "
            f"those of a {NAMES[result]}. Pass the folder as draft=, which tells them "
            "apart."
        )

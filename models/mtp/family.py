"""Families of MTP heads.

A head guesses one token further than its target. Position i pairs the target's hidden
state at position i with the token at position i + 1, and guesses the token at i + 2:

    x = proj([norm_e(embedding(t[i+1])) | norm_h(hidden[i])])
    y = blocks(x)                         decoder blocks with a cache of their own
    logits = output(final(y))
    recycled = final(y) or y              by the convention; the next step's hidden

Families differ in the names of tensors, in the blocks, and in the `MtpConvention`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mlx_speculation.models.checkpoints.convention import MtpConvention
from mlx_speculation.models.mtp.blocks import Build

_MOST_HEADS = MtpConvention()


@dataclass(frozen=True, slots=True)
class MtpFamily:
    """One family of heads.

    Attributes:
        modules: the targets' modules under mlx_lm.models.
        rules: prefixes of tensor names in files, mapped to prefixes of names in
            `MtpHead`. Wrappers such as "language_model." are removed first, and the
            first match decides. {k} stands for any number. The value None marks copies
            of the target's tensors.
        after_trunk: whether {k} in "layers.{k}." continues the numbers of the target's
            layers.
        plus_one: whether norms are stored as w and applied as 1 + w.
        layers: "one": a single layer, applied again for each further drafted token;
            "chained": layer k makes drafted token k, from the output of layer k - 1 at
            the same position; "first": several are stored, only the first is used.
        depth: if one layer is applied again, the largest number of tokens that it
            drafts in a round; None: any number.
        split_rules: the rules for a head in a folder of its own, with mlx-vlm's names;
            None: `rules` apply.
    """

    name: str
    modules: tuple[str, ...]
    rules: Mapping[str, str | None]
    build: Build
    convention: MtpConvention = _MOST_HEADS
    after_trunk: bool = False
    plus_one: bool = False
    layers: Literal["one", "chained", "first"] = "one"
    depth: int | None = None
    split_rules: Mapping[str, str | None] | None = None

    def place(self, name: str, trunk: int, *, split: bool = False) -> "Place | None":
        """Return where a tensor of a file belongs; None: it is not in the head."""
        core = without_wrappers(name)
        rules = self.split_rules if split and self.split_rules else self.rules
        for begin, canonical in rules.items():
            match = _pattern(begin).match(core)
            if match is None:
                continue
            k = int(match[1]) if match.groups() else 0
            if self.after_trunk and begin.startswith("layers."):
                k -= trunk
                if k < 0:
                    return None
            if canonical is None:
                return Place(None, k)
            rest = core[match.end() :]
            place = canonical.replace("{k}", str(k)) + rest
            return Place(place, int(place.split(".")[1]))
        return None

    def file_name(self, canonical: str, trunk: int) -> str:
        """Return the usual name in files for a name in `MtpHead`."""
        for begin, ours in self.rules.items():
            match = None if ours is None else _pattern(ours).match(canonical)
            if match is not None:
                k = int(match[1]) if match.groups() else 0
                if self.after_trunk and begin.startswith("layers."):
                    k += trunk
                return begin.replace("{k}", str(k)) + canonical[match.end() :]
        return canonical


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a tensor."""

    name: str | None  # its name in `MtpHead`; None: a copy that is not read
    layer: int


def _pattern(begin: str) -> re.Pattern[str]:
    return re.compile(re.escape(begin).replace(r"\{k\}", r"(\d+)"))


_WRAPPERS = re.compile(r"(?:(?:language_model|model|backbone|draft)\.)*")


def without_wrappers(name: str) -> str:
    """Return a tensor's name without the modules that wrap a text model."""
    match = _WRAPPERS.match(name)
    assert match is not None
    return name[match.end() :]

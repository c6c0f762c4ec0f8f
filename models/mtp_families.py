"""MTP heads: one table of all families.

A head guesses one token further than its target. Slot i pairs the target's hidden
state at position i with the token at position i + 1, and guesses the one at i + 2:

    x = proj([norm_e(embedding(t[i+1])) | norm_h(hidden[i])])
    y = blocks(x)                         decoder blocks with a cache of their own
    logits = output(final(y))             recycled: final(y) or y, as the family says

Families differ in the names of tensors, in the block, and in what no tensor shows: the
`Contract`. This module says what a family is; `mtp_files` finds its tensors,
`mtp_transforms` brings them into one form, and `mtp_head` runs them.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import mlx.nn as nn

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import mtp_blocks
from mlx_speculation.models.instances import plain_class
from mlx_speculation.models.mtp_blocks import Block

Side = Literal["after_norm", "before_norm"]
Order = Literal["embedding_first", "hidden_first"]
# A tuple names those norms that are stored as w and applied as 1 + w.
Norms = Literal["stored", "plus_one"] | tuple[str, ...]
# The norms of a layer of a head, by their names in `MtpHead`, that packs were seen to
# differ in: some of them were converted, and others were left.
MIXED_NORMS = ("norm_e", "norm_h", "input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True, slots=True)
class Contract:
    """What a head was trained with, and its tensors do not show.

    Attributes:
        hidden: which state of the target goes in: after or before its final norm.
        recycled: which state of the head goes into its next step.
        order: what comes first in the concatenation.
        norms: how norm weights are stored: "stored" is used as it is, to "plus_one"
            one is added; a tuple names those of `MIXED_NORMS` to which one is added.
            None: the files decide.

    Raises:
        InvalidRequestError: a field has none of these values.
    """

    hidden: Side = "after_norm"
    recycled: Side = "after_norm"
    order: Order = "embedding_first"
    norms: Norms | None = None

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if not isinstance(value, str) or value not in allowed:
                raise InvalidRequestError(_not_one(name, value, allowed))
        norms = self.norms
        if isinstance(norms, tuple):
            known = bool(norms) and set(norms) <= set(MIXED_NORMS)
        else:
            known = norms is None or norms in ("stored", "plus_one")
        if not known:
            names = ("stored", "plus_one", f"a tuple of {', '.join(MIXED_NORMS)}")
            raise InvalidRequestError(_not_one("norms", norms, names))


# What the other fields may be.
CHOICES: Mapping[str, tuple[str, ...]] = {
    "hidden": get_args(Side),
    "recycled": get_args(Side),
    "order": get_args(Order),
}


def _not_one(name: str, value: Any, allowed: Iterable[str]) -> str:
    return (
        f"{name} of a contract is {value!r}, and one of {'; '.join(allowed)} is needed."
    )


@dataclass(frozen=True, slots=True)
class MtpFamily:
    """One family of heads.

    Attributes:
        name: for messages.
        modules: the targets' modules under mlx_lm.models.
        rules: beginnings of names in files, without wrappers such as
            "language_model.", and what they are called in `MtpHead`; the first that
            fits counts. {k} is a number. None: a copy of the target's own tensor.
        contract: what it is taken to be, unless somebody names another.
        build: makes the blocks of layer k from the target's arguments, the text part
            of config.json, and k.
        after_trunk: whether {k} in "layers.{k}." counts on after the target's layers.
        plus_one: whether norms are stored as w and applied as 1 + w.
        layers: "one": a single layer, applied again for each further draft;
            "chained": layer k makes draft k, from the output of layer k - 1 at the
            same slot; "first": several are stored, and the first is used like one.
        depth: the most drafts that a layer which is applied again is good for.
        split_rules: likewise as `rules`, for a head in a folder of its own in the
            dialect of mlx-vlm; None: the same names, perhaps without "mtp.".
    """

    name: str
    modules: tuple[str, ...]
    rules: Mapping[str, str | None]
    build: Callable[[Any, dict[str, Any], int], list[Block]]
    contract: Contract = Contract()
    after_trunk: bool = False
    plus_one: bool = False
    layers: Literal["one", "chained", "first"] = "one"
    depth: int | None = None
    split_rules: Mapping[str, str | None] | None = None

    def place(self, name: str, trunk: int, *, split: bool = False) -> "Place | None":
        """Return where a tensor of a file belongs; None: it is none of the head's.

        Args:
            name: as it stands in the file.
            trunk: how many layers the target has.
            split: whether by `split_rules`.
        """
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
        """Return the usual name in files of a tensor of `MtpHead`."""
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
    """Where a tensor belongs.

    Attributes:
        name: its name in `MtpHead`; None: a copy that is not read.
        layer: the layer of the head that it belongs to.
    """

    name: str | None
    layer: int


def _pattern(begin: str) -> re.Pattern[str]:
    return re.compile(re.escape(begin).replace(r"\{k\}", r"(\d+)"))  # re caches these


_WRAPPERS = re.compile(r"(?:(?:language_model|model|backbone|draft)\.)*")


def without_wrappers(name: str) -> str:
    """Return a tensor's name without the modules that are put around a text model."""
    match = _WRAPPERS.match(name)
    assert match is not None
    return name[match.end() :]


_QWEN_NAMES: dict[str, str | None] = {
    "mtp.fc.": "layers.0.proj.",
    "mtp.pre_fc_norm_embedding.": "layers.0.norm_e.",
    "mtp.pre_fc_norm_hidden.": "layers.0.norm_h.",
    "mtp.norm.": "layers.0.final.",
    "mtp.layers.{k}.": "layers.0.blocks.{k}.",
}

_DEEPSEEK_NAMES: dict[str, str | None] = {
    "layers.{k}.eh_proj.": "layers.{k}.proj.",
    "layers.{k}.enorm.": "layers.{k}.norm_e.",
    "layers.{k}.hnorm.": "layers.{k}.norm_h.",
    "layers.{k}.shared_head.norm.": "layers.{k}.final.",
    "layers.{k}.shared_head.head.": None,
    "layers.{k}.embed_tokens.": None,
    "layers.{k}.": "layers.{k}.blocks.0.",
}

# A head of GLM inside of its target in the dialect of MTPLX,
_GLM_NAMES: dict[str, str | None] = {
    **_DEEPSEEK_NAMES,
    "mtp.{k}.eh_proj.": "layers.{k}.proj.",
    "mtp.{k}.enorm.": "layers.{k}.norm_e.",
    "mtp.{k}.hnorm.": "layers.{k}.norm_h.",
    "mtp.{k}.norm.": "layers.{k}.final.",
    "mtp.{k}.block.": "layers.{k}.blocks.0.",
}
# and in a folder of its own in that of mlx-vlm.
_GLM_SPLIT: dict[str, str | None] = {
    "eh_proj.": "layers.0.proj.",
    "enorm.": "layers.0.norm_e.",
    "hnorm.": "layers.0.norm_h.",
    "shared_head_norm.": "layers.0.final.",
    "mtp_block.": "layers.0.blocks.0.",
    "embed_tokens.": None,
    "lm_head.": None,
}

_BAILING_NAMES: dict[str, str | None] = {
    "layers.{k}.eh_proj.": "layers.{k}.proj.",
    "layers.{k}.enorm.": "layers.{k}.norm_e.",
    "layers.{k}.hnorm.": "layers.{k}.norm_h.",
    "layers.{k}.final_layernorm.": "layers.{k}.final.",
    # Engines read the one above; transformers reads the names of DeepSeek.
    "layers.{k}.shared_head.norm.": "layers.{k}.final.",
    "layers.{k}.shared_head.head.": None,
    "layers.{k}.word_embeddings.": None,
    "layers.{k}.embed_tokens.": None,
}
_WHOLE_BLOCK: dict[str, str | None] = {"layers.{k}.": "layers.{k}.blocks.0."}

_STEP_NAMES: dict[str, str | None] = {
    "layers.{k}.eh_proj.": "layers.{k}.proj.",
    "layers.{k}.enorm.": "layers.{k}.norm_e.",
    "layers.{k}.hnorm.": "layers.{k}.norm_h.",
    "layers.{k}.transformer.shared_head.norm.": "layers.{k}.final.",
    "layers.{k}.transformer.shared_head.output.": "layers.{k}.output.",
    "layers.{k}.transformer.": "layers.{k}.blocks.0.",
    "layers.{k}.shared_head.norm.": "layers.{k}.final.",
    "layers.{k}.shared_head.output.": "layers.{k}.output.",
    "layers.{k}.embed_tokens.": None,
    "layers.{k}.": "layers.{k}.blocks.0.",
}

FAMILIES: tuple[MtpFamily, ...] = (
    MtpFamily(
        name="Qwen",
        modules=("qwen3_next", "qwen3_5", "qwen3_5_moe"),
        rules=_QWEN_NAMES,
        plus_one=True,
        build=mtp_blocks.qwen,
    ),
    MtpFamily(
        name="DeepSeek V3",
        modules=("deepseek_v3",),
        rules=_DEEPSEEK_NAMES,
        after_trunk=True,
        build=mtp_blocks.deepseek_v3,
    ),
    MtpFamily(
        name="DeepSeek V3.2 and GLM-5",
        modules=("deepseek_v32", "glm_moe_dsa"),
        rules=_DEEPSEEK_NAMES,
        after_trunk=True,
        build=mtp_blocks.deepseek_v32,
    ),
    MtpFamily(
        name="GLM-4.5 to 4.7",
        modules=("glm4_moe",),
        rules=_GLM_NAMES,
        after_trunk=True,
        build=mtp_blocks.glm4_moe,
    ),
    MtpFamily(
        name="GLM-4.7-Flash",
        modules=("glm4_moe_lite",),
        rules=_GLM_NAMES,
        split_rules=_GLM_SPLIT,
        after_trunk=True,
        build=mtp_blocks.glm4_moe_lite,
    ),
    MtpFamily(
        name="MiMo-7B",
        modules=("mimo",),
        rules={
            "mtp_layers.{k}.input_proj.": "layers.{k}.proj.",
            "mtp_layers.{k}.token_layernorm.": "layers.{k}.norm_e.",
            "mtp_layers.{k}.hidden_layernorm.": "layers.{k}.norm_h.",
            "mtp_layers.{k}.final_layernorm.": "layers.{k}.final.",
            "mtp_layers.{k}.": "layers.{k}.blocks.0.",
        },
        # Engines disagree on both states; these were measured, at one draft.
        contract=Contract("before_norm", "before_norm", "hidden_first"),
        depth=1,
        build=mtp_blocks.mimo,
    ),
    MtpFamily(
        name="MiMo-V2",
        modules=("mimo_v2_flash",),
        rules={
            "mtp.layers.{k}.eh_proj.": "layers.{k}.proj.",
            "mtp.layers.{k}.enorm.": "layers.{k}.norm_e.",
            "mtp.layers.{k}.hnorm.": "layers.{k}.norm_h.",
            "mtp.layers.{k}.final_layernorm.": "layers.{k}.final.",
            "mtp.layers.{k}.pre_mlp_layernorm.": (
                "layers.{k}.blocks.0.post_attention_layernorm."
            ),
            "mtp.layers.{k}.": "layers.{k}.blocks.0.",
        },
        contract=Contract("before_norm"),
        # Engines disagree on what the further layers are given.
        layers="first",
        build=mtp_blocks.mimo_v2_flash,
    ),
    MtpFamily(
        name="Ernie 4.5 MoE",
        modules=("ernie4_5_moe",),
        rules={
            "mtp_linear_proj.{k}.": "layers.{k}.proj.",
            "mtp_emb_norm.{k}.": "layers.{k}.norm_e.",
            "mtp_hidden_norm.{k}.": "layers.{k}.norm_h.",
            "mtp_block.{k}.": "layers.{k}.blocks.0.",
        },
        # There is no final norm: logits and the next step take the block's output.
        contract=Contract(recycled="before_norm"),
        build=mtp_blocks.ernie4_5_moe,
    ),
    MtpFamily(
        name="LongCat-Flash",
        modules=("longcat_flash",),
        rules={
            "mtp.embed_tokens.": "layers.0.embedding.",
            "mtp.norm.": "layers.0.final.",
            "mtp.layers.{k}.eh_proj.": "layers.{k}.proj.",
            "mtp.layers.{k}.enorm.m.": "layers.{k}.norm_e.",
            "mtp.layers.{k}.hnorm.m.": "layers.{k}.norm_h.",
            "mtp.layers.{k}.transformer_layer.mlp.": "layers.{k}.blocks.0.mlp.",
            "mtp.layers.{k}.": "layers.{k}.blocks.0.",
        },
        build=mtp_blocks.longcat_flash,
    ),
    MtpFamily(
        name="Nemotron-H",
        modules=("nemotron_h",),
        rules={
            "mtp.layers.{k}.eh_proj.": "layers.0.proj.",
            "mtp.layers.{k}.enorm.": "layers.0.norm_e.",
            "mtp.layers.{k}.hnorm.": "layers.0.norm_h.",
            "mtp.layers.{k}.final_layernorm.": "layers.0.final.",
            **_QWEN_NAMES,
        },
        build=mtp_blocks.nemotron_h,
    ),
    MtpFamily(
        name="Step-3.5",
        modules=("step3p5",),
        rules=_STEP_NAMES,
        contract=Contract("before_norm", "before_norm"),
        after_trunk=True,
        plus_one=True,
        layers="chained",
        build=mtp_blocks.step3p5,
    ),
    MtpFamily(
        name="Ling 2 and 2.5",
        modules=("bailing_moe", "bailing_hybrid"),
        rules={
            **_BAILING_NAMES,
            "layers.{k}.mlp.gate.weight": (
                "layers.{k}.blocks.0.mlp.gate.gate_proj.weight"
            ),
            **_WHOLE_BLOCK,
        },
        after_trunk=True,
        build=mtp_blocks.bailing,
    ),
    MtpFamily(
        name="Ling 3",
        modules=("bailing_moe_v3",),
        rules={**_BAILING_NAMES, **_WHOLE_BLOCK},
        after_trunk=True,
        build=mtp_blocks.bailing_moe_v3,
    ),
    MtpFamily(
        name="EXAONE MoE",
        modules=("exaone_moe",),
        rules=_QWEN_NAMES,
        build=mtp_blocks.exaone_moe,
    ),
)


def family_of(module: str) -> MtpFamily | None:
    """Return the family of a target's module, such as "mlx_lm.models.qwen3_next"."""
    last = module.rpartition(".")[2]
    return next((family for family in FAMILIES if last in family.modules), None)


def arguments_of(model: nn.Module) -> Any:
    """Return the arguments that the layers of a text model were made from."""
    inner: Any = getattr(model, "language_model", model)
    return inner.args


def module_of(model: nn.Module) -> str:
    """Return the module of mlx-lm that a model is from."""
    return plain_class(model).__module__

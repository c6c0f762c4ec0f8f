"""The table of all families of MTP heads."""

from typing import Any

import mlx.nn as nn

from mlx_speculation.models.checkpoints.convention import MtpConvention
from mlx_speculation.models.instance_hooks import plain_class
from mlx_speculation.models.mtp import blocks
from mlx_speculation.models.mtp.family import MtpFamily

Rules = dict[str, str | None]


def _parts(begin: str, **names: str) -> Rules:
    """Return rules that map `{begin}{name}.` in files to `layers.{k}.{part}.`."""
    return {f"{begin}{name}.": f"layers.{{k}}.{part}." for part, name in names.items()}


_NAMES = {"proj": "eh_proj", "norm_e": "enorm", "norm_h": "hnorm"}
_EXPERTS = {"first_k_dense_replace": 0, "moe_layer_freq": 1}
_WHOLE_BLOCK: Rules = {"layers.{k}.": "layers.{k}.blocks.0."}

_QWEN_NAMES: Rules = {
    **_parts(
        "mtp.",
        proj="fc",
        norm_e="pre_fc_norm_embedding",
        norm_h="pre_fc_norm_hidden",
        final="norm",
    ),
    "mtp.layers.{k}.": "layers.0.blocks.{k}.",
}

_DEEPSEEK_NAMES: Rules = {
    **_parts("layers.{k}.", **_NAMES, final="shared_head.norm"),
    "layers.{k}.shared_head.head.": None,
    "layers.{k}.embed_tokens.": None,
    **_WHOLE_BLOCK,
}

# GLM's own names, and those ("mtp.{k}.") that MTPLX gives a head in a target's folder.
_GLM_NAMES: Rules = {
    **_DEEPSEEK_NAMES,
    **_parts("mtp.{k}.", **_NAMES, final="norm"),
    "mtp.{k}.block.": "layers.{k}.blocks.0.",
}
# The names that mlx-vlm gives a head of GLM in a folder of its own.
_GLM_SPLIT: Rules = {
    **_parts("", **_NAMES, final="shared_head_norm"),
    "mtp_block.": "layers.0.blocks.0.",
    "embed_tokens.": None,
    "lm_head.": None,
}

_BAILING_NAMES: Rules = {
    **_parts("layers.{k}.", **_NAMES, final="final_layernorm"),
    # Engines read final_layernorm; transformers reads the names of DeepSeek.
    "layers.{k}.shared_head.norm.": "layers.{k}.final.",
    "layers.{k}.shared_head.head.": None,
    "layers.{k}.word_embeddings.": None,
    "layers.{k}.embed_tokens.": None,
}

_STEP_ENDS = {"final": "shared_head.norm", "output": "shared_head.output"}
_STEP_NAMES: Rules = {
    **_parts("layers.{k}.", **_NAMES),
    **_parts("layers.{k}.transformer.", **_STEP_ENDS),
    "layers.{k}.transformer.": "layers.{k}.blocks.0.",
    **_parts("layers.{k}.", **_STEP_ENDS),
    "layers.{k}.embed_tokens.": None,
    **_WHOLE_BLOCK,
}

FAMILIES: tuple[MtpFamily, ...] = (
    MtpFamily(
        name="Qwen",
        modules=("qwen3_next", "qwen3_5", "qwen3_5_moe"),
        rules=_QWEN_NAMES,
        plus_one=True,
        build=blocks.qwen,
    ),
    MtpFamily(
        name="DeepSeek V3",
        modules=("deepseek_v3",),
        rules=_DEEPSEEK_NAMES,
        after_trunk=True,
        build=blocks.one("DeepseekV3DecoderLayer", mask_array=True, **_EXPERTS),
    ),
    MtpFamily(
        name="DeepSeek V3.2 and GLM-5",
        modules=("deepseek_v32", "glm_moe_dsa"),
        rules=_DEEPSEEK_NAMES,
        after_trunk=True,
        build=blocks.deepseek_v32,
    ),
    MtpFamily(
        name="GLM-4.5 to 4.7",
        modules=("glm4_moe",),
        rules=_GLM_NAMES,
        after_trunk=True,
        build=blocks.one("DecoderLayer", first_k_dense_replace=0),
    ),
    MtpFamily(
        name="GLM-4.7-Flash",
        modules=("glm4_moe_lite",),
        rules=_GLM_NAMES,
        split_rules=_GLM_SPLIT,
        after_trunk=True,
        build=blocks.one("Glm4MoeLiteDecoderLayer", mask_array=True, **_EXPERTS),
    ),
    MtpFamily(
        name="MiMo-7B",
        modules=("mimo",),
        rules={
            **_parts(
                "mtp_layers.{k}.",
                proj="input_proj",
                norm_e="token_layernorm",
                norm_h="hidden_layernorm",
                final="final_layernorm",
            ),
            "mtp_layers.{k}.": "layers.{k}.blocks.0.",
        },
        # Engines disagree on `hidden` and on `recycled`. These values come from a
        # measurement with one drafted token a round.
        convention=MtpConvention("before_norm", "before_norm", "hidden_first"),
        depth=1,
        build=blocks.mimo,
    ),
    MtpFamily(
        name="MiMo-V2",
        modules=("mimo_v2_flash",),
        rules={
            **_parts("mtp.layers.{k}.", **_NAMES, final="final_layernorm"),
            "mtp.layers.{k}.pre_mlp_layernorm.": (
                "layers.{k}.blocks.0.post_attention_layernorm."
            ),
            "mtp.layers.{k}.": "layers.{k}.blocks.0.",
        },
        convention=MtpConvention("before_norm"),
        # Engines disagree on the input of the later layers.
        layers="first",
        build=blocks.mimo_v2_flash,
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
        convention=MtpConvention(recycled="before_norm"),
        build=blocks.one("Ernie4_5_DecoderLayer", moe_layer_end_index=-1),
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
        build=blocks.longcat_flash,
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
        build=blocks.nemotron_h,
    ),
    MtpFamily(
        name="Step-3.5",
        modules=("step3p5",),
        rules=_STEP_NAMES,
        convention=MtpConvention("before_norm", "before_norm"),
        after_trunk=True,
        plus_one=True,
        layers="chained",
        build=blocks.step3p5,
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
        build=blocks.bailing,
    ),
    MtpFamily(
        name="Ling 3",
        modules=("bailing_moe_v3",),
        rules={**_BAILING_NAMES, **_WHOLE_BLOCK},
        after_trunk=True,
        build=blocks.one(
            "BailingDecoderLayer", mask_array=True, first_k_dense_replace=0
        ),
    ),
    MtpFamily(
        name="EXAONE MoE",
        modules=("exaone_moe",),
        rules=_QWEN_NAMES,
        build=blocks.exaone_moe,
    ),
)


def family_of(module: str) -> MtpFamily | None:
    """Return the family of a target's module, such as "mlx_lm.models.qwen3_next"."""
    last = module.rpartition(".")[2]
    return next((family for family in FAMILIES if last in family.modules), None)


def arguments_of(model: nn.Module) -> Any:
    """Return the `ModelArgs` with which mlx-lm makes the layers of a text model."""
    adapter = getattr(model, "as_mlx_lm", None)  # a target that reads images has one
    if adapter is not None:
        return adapter[1]
    inner: Any = getattr(model, "language_model", model)
    return inner.args


def module_of(model: nn.Module) -> str:
    """Return the name of the module of mlx-lm that a model is from."""
    adapter = getattr(model, "as_mlx_lm", None)
    return plain_class(model).__module__ if adapter is None else str(adapter[0])

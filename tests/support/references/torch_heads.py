"""MTP heads made of transformers' own layers, on torch in float32.

transformers has an MTP module for a few families (`own_mtp_rows`); for the others its
decoder layer stands between norms and projections that are put around it here.
"""

import dataclasses
import importlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel
from transformers.utils import logging

from support.references.mtp.base import Family, MtpRows, epsilon
from support.references.numerics import Array, Ids, Tensors, below

logging.disable_progress_bar()
torch.set_num_threads(1)

_TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
_ROUND = ("enorm", "hnorm", "eh_proj", "shared_head.", "embed_tokens.", "final_layern")


@dataclass(frozen=True, slots=True)
class TorchLayer:
    """Where transformers has the decoder layer of a family.

    Attributes:
        prefix: of the names of its classes.
        block: where the block's tensors stand on disk.
        index: of a layer of the target that is of the head's kind.
        module: under transformers.models; None: as in mlx-lm.
        changes: to the family's configuration, which transformers names otherwise.
        renames: of tensors.
        rotary: the name of the class that makes the angles, without the prefix.
        skipped: tensors around the block, by the beginning of their names.
    """

    prefix: str
    block: str
    index: int
    module: str | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    renames: dict[str, str] = field(default_factory=dict)
    rotary: str = "RotaryEmbedding"
    skipped: tuple[str, ...] = _ROUND


_QWEN = "mtp.layers.0."
_NUMBERED = "model.layers.2."
_MIMO_ROPE = {
    "rope_type": "default",
    "rope_theta": 1000.0,
    "partial_rotary_factor": 0.5,
}

LAYERS: dict[str, TorchLayer] = {
    "qwen3_next": TorchLayer("Qwen3Next", _QWEN, 3),
    "qwen3_5": TorchLayer("Qwen3_5", _QWEN, 3, rotary="TextRotaryEmbedding"),
    "qwen3_5_tied": TorchLayer("Qwen3_5", _QWEN, 3, rotary="TextRotaryEmbedding"),
    "qwen3_5_moe": TorchLayer("Qwen3_5Moe", _QWEN, 3, rotary="TextRotaryEmbedding"),
    "deepseek_v3": TorchLayer("DeepseekV3", _NUMBERED, 1),
    "deepseek_v3_yarn": TorchLayer("DeepseekV3", _NUMBERED, 1),
    "deepseek_v32": TorchLayer("DeepseekV32", _NUMBERED, 1),
    "glm_moe_dsa": TorchLayer("GlmMoeDsa", _NUMBERED, 1),
    "glm4_moe_lite": TorchLayer("Glm4MoeLite", _NUMBERED, 1),
    "glm4_moe": TorchLayer("Glm4Moe", _NUMBERED, 1),
    "glm4_moe_air": TorchLayer("Glm4Moe", _NUMBERED, 1),
    # MiMo's block is Qwen2's.
    "mimo": TorchLayer(
        "Qwen2",
        "model.mtp_layers.0.",
        0,
        module="qwen2",
        changes={"model_type": "qwen2"},
        skipped=("token_layern", "hidden_layern", "final_layern", "input_proj"),
    ),
    "mimo_v2_flash": TorchLayer(
        "MiMoV2Flash",
        "model.mtp.layers.0.",
        1,
        changes={
            "layer_types": ["full_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "dense"],
            "rms_norm_eps": 1e-5,
            "head_dim": 16,
            "v_head_dim": 8,
            "num_key_value_heads": 1,  # and twice as many in sliding layers
            "rope_parameters": {
                "full_attention": _MIMO_ROPE,
                "sliding_attention": _MIMO_ROPE,
            },
        },
        renames={
            "attention_sink_bias": "sinks",
            "pre_mlp_layernorm": "post_attention_layernorm",
        },
    ),
    "ernie": TorchLayer("Ernie4_5_Moe", "model.mtp_block.0.", 0),
    "ernie_bias": TorchLayer("Ernie4_5_Moe", "model.mtp_block.0.", 0),
    "exaone_moe": TorchLayer(
        "ExaoneMoe", _QWEN, 0, changes={"mlp_layer_types": ["dense", "sparse"]}
    ),
    "exaone_moe_full_first": TorchLayer(
        "ExaoneMoe", _QWEN, 0, changes={"mlp_layer_types": ["dense", "sparse"]}
    ),
    "longcat_flash": TorchLayer(
        "LongcatFlash", "model.mtp.layers.0.", 0, changes={"head_dim": 8}
    ),
    "nemotron_h": TorchLayer("NemotronH", "mtp.layers.", 0, rotary=""),
    "nemotron_h_fewer_experts": TorchLayer(
        "NemotronH", "mtp.layers.", 0, rotary="", changes={"n_routed_experts": 4}
    ),
    "qwen3_5_moe_other_experts": TorchLayer(
        "Qwen3_5Moe",
        _QWEN,
        3,
        rotary="TextRotaryEmbedding",
        changes={"num_experts": 4, "num_experts_per_tok": 3},
    ),
    "nemotron_h_latent": TorchLayer("NemotronH", "mtp.layers.", 0, rotary=""),
}


def torch_rows(
    name: str,
    family: Family,
    tensors: Tensors,
    hidden: Array,
    tokens: Ids,
    *,
    embedding: Array,
    head: Array,
) -> MtpRows:
    """Run the first layer of a head, as `support.references.mtp.base.rows` does."""
    layer, names = LAYERS[name], family.names(family.text, 0)
    config = torch_config(layer, family)
    classes = _classes(layer, family)
    norm = getattr(classes, f"{layer.prefix}RMSNorm")
    size, eps = hidden.shape[1], epsilon(family.text)

    def normed(place: str, x: torch.Tensor) -> torch.Tensor:
        own = norm(size, eps=eps)
        fill(own, {"weight": tensors[f"{place}.weight"]})
        return own(x)

    project: Any = torch.nn.Linear(
        2 * size, size, bias=f"{names.project}.bias" in tensors
    )
    fill(project, below(tensors, f"{names.project}."))
    both = [
        normed(names.token_norm, to_torch(embedding[tokens])[None]),
        normed(names.state_norm, to_torch(hidden)[None]),
    ]
    with torch.no_grad():
        x = project(torch.cat(both[::-1] if family.hidden_first else both, dim=-1))
        run: Callable[..., Any] = _BLOCKS.get(family.module, _run_layer)
        x = run(layer, family, config, tensors, x)
        y = x if names.last_norm is None else normed(names.last_norm, x)
    recycled = y if family.recycles == "after_norm" else x
    logits = y[0].numpy().astype(np.float64) @ head.T
    return MtpRows(logits, recycled[0].numpy().astype(np.float64))


def torch_config(layer: TorchLayer, family: Family) -> Any:
    """Return transformers' configuration of a family's target."""
    config = AutoConfig.for_model(**{**family.text, **_TOKENS, **layer.changes})
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return config


OWN_MTP = (
    "deepseek_v3",
    "deepseek_v3_yarn",
    "glm4_moe",
    "glm4_moe_air",
    "bailing_moe_v3_shared_head",
    "step3p5",
)
# transformers calls Ling 3 so; mlx-lm calls Ling 2.5 so.
_LING_3 = {
    "model_type": "bailing_hybrid",
    "mtp_layer_types": ["full_attention"],
    "mtp_mlp_layer_types": ["sparse"],
}


def own_mtp_rows(
    name: str,
    family: Family,
    folder: Path,
    hidden: Array,
    tokens: Ids,
    *,
    embedding: Array,
    layer: int = 0,
) -> Array:
    """Run a layer of transformers' own MTP module, read from the folder.

    Returns:
        [n, H], the states after the last norm, of which logits are made.
    """
    changes = {**family.config, **_TOKENS}
    if name == "step3p5":
        main = _step_main(changes)
    else:
        if family.module == "bailing_moe_v3":
            changes |= _LING_3
        main = AutoModelForCausalLM.from_config(AutoConfig.for_model(**changes))
    main.config.name_or_path, main.config.dtype = str(folder), torch.float32
    # The classes know the numbers of layers of published models alone.
    main._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[2-9]\."]
    fill(main.get_input_embeddings(), {"weight": embedding})
    module = MtpModel.from_pretrained(main.eval()).eval()
    with torch.no_grad():
        out = module.forward_layer(
            layer,
            to_torch(hidden)[None],
            torch.arange(len(tokens))[None],
            None,
            input_ids=torch.tensor(tokens)[None],
        )
    return out[0].numpy().astype(np.float64)  # type: ignore[no-any-return]


def plain_step(family: Family) -> Family:
    """Return Step-3.5 as transformers can read it.

    There, sliding layers of a head have as many heads as full ones.
    """
    same = {"num_attention_heads": 4, "num_attention_groups": 2}
    config = {**family.config, "attention_other_setting": same}
    return dataclasses.replace(family, config=config)


def _step_main(config: dict[str, Any]) -> Any:
    """Return a Step-3.7, the language model of which is a Step-3.5."""
    step = importlib.import_module("transformers.models.step3p7")
    text = {k: v for k, v in config.items() if k != "num_key_value_heads"}
    vision = {"width": 16, "layers": 1, "heads": 2}
    whole = step.Step3p7Config(text_config=text, vision_config=vision)
    return step.Step3p7ForConditionalGeneration(whole)


def _classes(layer: TorchLayer, family: Family) -> Any:
    name = layer.module or family.module
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def _run_layer(
    layer: TorchLayer, family: Family, config: Any, tensors: Tensors, x: torch.Tensor
) -> Any:
    """Run transformers' decoder layer with the head's tensors on x [1, n, H]."""
    block = getattr(_classes(layer, family), f"{layer.prefix}DecoderLayer")
    block = block(config, layer.index)
    found = below(tensors, layer.block)
    for old, new in layer.renames.items():
        found = {name.replace(old, new): tensor for name, tensor in found.items()}
    found = {k: v for k, v in found.items() if not k.startswith(layer.skipped)}
    fill(block, found)
    out = block(x, **_around(layer, family, config, x))
    return out[0] if isinstance(out, tuple) else out


def _run_longcat(
    layer: TorchLayer, family: Family, config: Any, tensors: Tensors, x: torch.Tensor
) -> torch.Tensor:
    """Put LongCat's parts together: its decoder layer has two of each."""
    classes, found = _classes(layer, family), below(tensors, layer.block)
    attention = classes.LongcatFlashMLA(config, 0)
    fill(attention, below(found, "self_attn."))
    mlp = classes.LongcatFlashMLP(config)
    fill(mlp, below(found, "transformer_layer.mlp."))
    norms = [classes.LongcatFlashRMSNorm(x.shape[-1], eps=1e-6) for _ in range(2)]
    fill(norms[0], below(found, "input_layernorm."))
    fill(norms[1], below(found, "post_attention_layernorm."))
    x = x + attention(norms[0](x), **_around(layer, family, config, x))[0]
    return x + mlp(norms[1](x))


def _run_nemotron(
    layer: TorchLayer, family: Family, config: Any, tensors: Tensors, x: torch.Tensor
) -> torch.Tensor:
    """Run Nemotron's two blocks, the kinds of which the target has too."""
    classes = _classes(layer, family)
    for number, index in enumerate((1, 2)):
        block = classes.NemotronHBlock(config, index)
        found = below(tensors, f"{layer.block}{number}.")
        found = {k: v for k, v in found.items() if not k.startswith(layer.skipped)}
        fill(block, found)
        x = block(x, **_around(layer, family, config, x))
    return x


_BLOCKS: dict[str, Callable[..., Any]] = {
    "longcat_flash": _run_longcat,
    "nemotron_h": _run_nemotron,
}


def _around(
    layer: TorchLayer, family: Family, config: Any, x: torch.Tensor
) -> dict[str, Any]:
    """Return the mask, positions and angles that a layer is given."""
    n = x.shape[1]
    positions = torch.arange(n)[None]
    queries, keys = torch.arange(n)[:, None], torch.arange(n)[None]
    seen = keys <= queries
    kinds = getattr(config, "layer_types", None)
    kind = kinds[layer.index] if kinds else "full_attention"
    if kind == "sliding_attention":
        # As mlx-lm counts: transformers counts one more in MiMo-V2.
        text = family.text
        window = text.get("sliding_window_size") or text["sliding_window"]
        seen = seen & (keys > queries - window)
    lowest = torch.finfo(torch.float32).min
    given: dict[str, Any] = {
        "attention_mask": torch.where(seen, 0.0, lowest)[None, None],
        "position_ids": positions,
    }
    if layer.rotary:
        rotary = getattr(_classes(layer, family), f"{layer.prefix}{layer.rotary}")
        by_kind = "full_attention" in (getattr(config, "rope_parameters", None) or {})
        more = {"layer_type": kind} if by_kind else {}
        given["position_embeddings"] = rotary(config)(x, positions, **more)
    return given


def fill(module: Any, tensors: Tensors) -> None:
    """Give a module all its weights, experts stacked as transformers has them."""
    stacks: dict[tuple[str, str], list[NDArray[Any]]] = defaultdict(list)
    found = {}
    for name, tensor in tensors.items():
        before, _, after = name.partition("experts.")
        if after[:1].isdigit():  # experts are in order
            stacks[f"{before}experts.", after.split(".")[1]].append(tensor)
        else:
            found[name] = to_torch(tensor)
    for (prefix, which), parts in stacks.items():
        if which == "gate_proj":
            ups = stacks[prefix, "up_proj"]
            joined = [np.concatenate(p) for p in zip(parts, ups, strict=True)]
            found[f"{prefix}gate_up_proj"] = to_torch(np.stack(joined))
        elif which == "down_proj" or (prefix, "gate_proj") not in stacks:
            found[f"{prefix}{which}"] = to_torch(np.stack(parts))
    module.load_state_dict(found, strict=True)
    module.eval()


def to_torch(array: NDArray[Any]) -> torch.Tensor:
    return torch.tensor(np.asarray(array, dtype=np.float32))

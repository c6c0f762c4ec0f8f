"""MTP heads of transformers, and the loading of weights into its classes."""

import importlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel
from transformers.utils import logging

from support.references.mtp.base import Family
from support.references.numerics import Array, Ids, Tensors

logging.disable_progress_bar()
torch.set_num_threads(1)

_TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
OWN_MTP = (
    "deepseek_v3",
    "deepseek_v3_yarn",
    "glm4_moe",
    "glm4_moe_air",
    "bailing_moe_v3_shared_head",
    "step3p5_plain",  # sliding layers have as many heads as full ones
)
# transformers uses this name for Ling 3, mlx-lm for Ling 2.5.
_LING_3 = {
    "model_type": "bailing_hybrid",
    "mtp_layer_types": ["full_attention"],
    "mtp_mlp_layer_types": ["sparse"],
}


def own_mtp_rows(
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
        [n, H], the states after the last norm, from which logits are computed.
    """
    changes = {**family.config, **_TOKENS}
    if family.module == "step3p5":
        main = _step_main(changes)
    else:
        if family.module == "bailing_moe_v3":
            changes |= _LING_3
        main = AutoModelForCausalLM.from_config(AutoConfig.for_model(**changes))
    main.config.name_or_path, main.config.dtype = str(folder), torch.float32
    # The classes know only the numbers of layers of published models.
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


def _step_main(config: dict[str, Any]) -> Any:
    """Return a Step-3.7, whose language model is a Step-3.5."""
    step = importlib.import_module("transformers.models.step3p7")
    text = {k: v for k, v in config.items() if k != "num_key_value_heads"}
    vision = {"width": 16, "layers": 1, "heads": 2}
    whole = step.Step3p7Config(text_config=text, vision_config=vision)
    return step.Step3p7ForConditionalGeneration(whole)


def fill(module: Any, tensors: Tensors) -> None:
    """Load all weights of a module, with experts stacked as in transformers."""
    stacks: dict[tuple[str, str], list[NDArray[Any]]] = defaultdict(list)
    state = {}
    for name, tensor in tensors.items():
        before, _, after = name.partition("experts.")
        if after[:1].isdigit():  # experts are in order
            stacks[f"{before}experts.", after.split(".")[1]].append(tensor)
        else:
            state[name] = to_torch(tensor)
    for (prefix, which), parts in stacks.items():
        if which == "gate_proj":
            ups = stacks[prefix, "up_proj"]
            joined = [np.concatenate(p) for p in zip(parts, ups, strict=True)]
            state[f"{prefix}gate_up_proj"] = to_torch(np.stack(joined))
        elif which == "down_proj" or (prefix, "gate_proj") not in stacks:
            state[f"{prefix}{which}"] = to_torch(np.stack(parts))
    module.load_state_dict(state, strict=True)
    module.eval()


def to_torch(array: NDArray[Any]) -> torch.Tensor:
    return torch.tensor(np.asarray(array, dtype=np.float32))

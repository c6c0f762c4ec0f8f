"""Loading of weights into the classes of transformers."""

from collections import defaultdict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.utils import logging

from support.references.blocks.primitives import Weights

logging.disable_progress_bar()
torch.set_num_threads(1)


def below(tensors: Weights, prefix: str) -> dict[str, NDArray[Any]]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def fill(module: Any, tensors: Weights) -> None:
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

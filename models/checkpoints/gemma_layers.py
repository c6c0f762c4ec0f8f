"""The arguments of Gemma 4's decoder layers in a drafter's config.json."""

from typing import Any

from mlx_lm.models import gemma4_text

from mlx_speculation.models.checkpoints.draft_checkpoint import Config


def gemma_args(text: Config, layers: int) -> gemma4_text.ModelArgs:
    """Return what mlx-lm makes layers of that have keys and values of their own.

    All of them see the whole text, and have no experts and no inputs of their own.

    Args:
        text: the part of config.json that has the sizes of the layers.
        layers: how many there are.
    """
    own: dict[str, Any] = {
        "layer_types": ["full_attention"] * layers,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
    }
    found: gemma4_text.ModelArgs = gemma4_text.ModelArgs.from_dict({**text, **own})
    return found


def act_of(gemma: gemma4_text.ModelArgs | None) -> tuple[str, ...]:
    """Return the key of the layers' activation, and what it may be; see `layer_args`.

    Args:
        gemma: what its layers are made of; None: they are Llama's or Qwen 3's.
    """
    if gemma is None:
        return ("hidden_act", "silu", "swish")
    return ("hidden_activation", "gelu_pytorch_tanh")

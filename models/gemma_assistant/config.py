"""Configuration of Gemma 4 assistants, from config.json."""

from dataclasses import dataclass

from mlx_lm.models import gemma4_text

from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models.checkpoints.draft_checkpoint import (
    Config,
    layer_part,
    layer_windows,
    number,
)
from mlx_speculation.models.checkpoints.gemma_layers import with_rotations

NAME = "Gemma 4 assistant"
MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")


@dataclass(frozen=True, slots=True)
class Centroids:
    """Settings of an output layer that scores only the tokens of a few groups."""

    groups: int  # the number of groups; all have equally many tokens
    chosen: int  # the number of groups whose tokens are scored


@dataclass(frozen=True, slots=True)
class AssistantSettings:
    """The shape of an assistant."""

    target_dim: int  # the hidden size of its target
    layers: gemma4_text.ModelArgs
    centroids: Centroids | None  # None: the output layer scores every token


def is_assistant(config: Config) -> bool:
    """Return whether a config.json is that of a Gemma 4 assistant."""
    return config.get("model_type") in MODEL_TYPES


def read_assistant_settings(config: Config) -> AssistantSettings:
    """Read config.json.

    Raises:
        ModelFolderError: a value is missing or not supported.
    """
    if not is_assistant(config):
        raise ModelFolderError(
            f"model_type in config.json is {config.get('model_type')!r}; that of an "
            f"assistant is {' or '.join(map(repr, MODEL_TYPES))}. Name the assistant's "
            "folder."
        )
    layers = _layers(config)
    centroids = None
    if config.get("use_ordered_embeddings"):
        centroids = Centroids(
            number(config, "num_centroids", NAME, 2048),
            number(config, "centroid_intermediate_top_k", NAME, 32),
        )
        if layers.vocab_size % centroids.groups or centroids.chosen > centroids.groups:
            raise ModelFolderError(
                f"The {NAME} has {layers.vocab_size} tokens in {centroids.groups} "
                f"groups and reads {centroids.chosen} groups; the groups must divide "
                f"the tokens evenly, and at most {centroids.groups} can be read. "
                "Correct config.json, or choose another assistant."
            )
    width = number(config, "backbone_hidden_size", NAME)
    return AssistantSettings(width, layers, centroids)


def _layers(config: Config) -> gemma4_text.ModelArgs:
    text = layer_part(config)
    count = number(text, "num_hidden_layers", NAME)
    wanted = ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim")
    for key in (*wanted, "vocab_size", "sliding_window"):
        number(text, key, NAME)
    layer_windows(text.get("layer_types"), count, text, "sliding_window", NAME)
    for key in ("hidden_size_per_layer_input", "enable_moe_block", "attention_bias"):
        if text.get(key):
            raise ModelFolderError(
                f"{key} {text[key]!r} in config.json of the {NAME} is not supported. "
                "Choose another drafter."
            )
    # No layer has keys and values of its own, though some files say that layers do.
    fields = {
        "num_kv_shared_layers": count,
        "hidden_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
    }
    args = gemma4_text.ModelArgs.from_dict({**text, **fields})
    return with_rotations(args, config, NAME)

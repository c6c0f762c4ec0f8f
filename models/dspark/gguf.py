"""DSpark drafters in GGUF files (PrismML's), converted to DeepSpec's names.

The files do not say whether their list of layers counts layers from 0, or entries of
the tuple of hidden states, which begins with the embeddings. The list is read as layers
from 0, unless a probe decides otherwise.
"""

from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models.checkpoints.draft_checkpoint import (
    Config,
    Weights,
    number,
    renamed,
)

_KIND = "dspark"
# Metadata keys after "dspark.", and the keys of config.json that they become.
_SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "context_length": "max_position_embeddings",
}
# Metadata keys after "dspark.dspark.", and the keys of config.json that they become.
_OWN = {
    "block_size": "block_size",
    "mask_token_id": "mask_token_id",
    "target_layers": "target_layer_ids",
    "markov_rank": "markov_rank",
    "log_snr_conditioning": "log_snr_conditioning",
    "min_log_snr": "min_log_snr",
    "max_log_snr": "max_log_snr",
}
_NAMES = {
    "dspark.fc.": "fc.",
    "dspark.hidden_norm.": "hidden_norm.",
    "dspark.markov_head_a.": "markov_head.markov_w1.",
    "dspark.markov_head_b.": "markov_head.markov_w2.",
    "dspark.confidence_head.": "confidence_head.",
    "dspark.log_snr_fc": "log_snr_fc",
    "token_embd.": "embed_tokens.",
    "output_norm.": "norm.",
    "output.": "lm_head.",
}
_LAYER = {
    "attn_norm.": "input_layernorm.",
    "ffn_norm.": "post_attention_layernorm.",
    "attn_q.": "self_attn.q_proj.",
    "attn_k.": "self_attn.k_proj.",
    "attn_v.": "self_attn.v_proj.",
    "attn_output.": "self_attn.o_proj.",
    "attn_q_norm.": "self_attn.q_norm.",
    "attn_k_norm.": "self_attn.k_norm.",
    "ffn_gate.": "mlp.gate_proj.",
    "ffn_up.": "mlp.up_proj.",
    "ffn_down.": "mlp.down_proj.",
}


def gguf_file(path: Path) -> Path | None:
    """Return the GGUF file at a path: the path itself, or the only one in a folder.

    None: the folder has a config.json, or not exactly one GGUF file.
    """
    if path.suffix == ".gguf":
        return path
    try:
        files = sorted(path.glob("*.gguf"))
    except OSError:  # such as a name that is too long; the next reader refuses it
        return None
    return files[0] if len(files) == 1 and not (path / "config.json").exists() else None


def read_gguf(file: Path) -> tuple[Config, Weights]:
    """Return the metadata as a config.json has it, and tensors by DeepSpec's names.

    Raises:
        ModelFolderError: the file cannot be read, or holds another kind of model.
    """
    try:
        result: Any = mx.load(str(file), return_metadata=True)
        tensors, metadata = result
    except (RuntimeError, ValueError, OSError) as error:
        raise ModelFolderError(f"{str(file)!r} cannot be read: {error}.") from error
    kind = metadata.get("general.architecture")
    if kind != _KIND:
        raise ModelFolderError(
            f"{str(file)!r} has the architecture {kind!r}, but only {_KIND!r} is read "
            "from a GGUF file. Convert it to safetensors."
        )
    config: Config = {"architectures": ["DSpark in GGUF"], "gguf_layers": True}
    for prefix, names in (("dspark.", _SIZES), ("dspark.dspark.", _OWN)):
        for theirs, ours in names.items():
            if (value := metadata.get(prefix + theirs)) is not None:
                config[ours] = value.tolist() if isinstance(value, mx.array) else value
    begins = dict(_NAMES)
    for index in range(number(config, "num_hidden_layers", file.name, 1)):
        begins |= {f"blk.{index}.{k}": f"layers.{index}.{v}" for k, v in _LAYER.items()}
    return config, renamed(tensors, begins)

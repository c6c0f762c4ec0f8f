"""Conversion of a Llama model in a GGUF file to a folder that mlx-lm loads."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_speculation.errors import ModelFolderError

_ENDS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL = 3  # type of control tokens, such as the end of a turn


def convert_gguf(file: Path, folder: Path) -> None:
    """Write config.json, bfloat16 weights and the tokenizer of a GGUF file.

    The model must have the architecture "llama" and a byte-level BPE tokenizer. The
    folder must exist.

    Raises:
        ModelFolderError: the file cannot be read, or is of another kind.
    """
    tensors: Any
    said: Any
    try:
        tensors, said = mx.load(str(file), return_metadata=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelFolderError(f"{str(file)!r} cannot be read: {error}.") from error
    kind = said.get("general.architecture"), said.get("tokenizer.ggml.model")
    if kind != ("llama", "gpt2"):
        raise ModelFolderError(
            f"{str(file)!r} is of architecture {kind[0]!r} with a tokenizer "
            f"{kind[1]!r}; only 'llama' with 'gpt2' is supported."
        )
    config = _config(said, tied="output.weight" not in tensors)
    weights = _weights(tensors, config)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    _tokenizer(said).save_pretrained(folder)
    text = json.dumps(config, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def _config(said: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    def number(name: str) -> Any:
        return said[f"llama.{name}"].item()

    heads = number("attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": number("embedding_length"),
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv"),
        "head_dim": number("embedding_length") // heads,
        "max_position_embeddings": number("context_length"),
        # The file has a float32: unrounded, 1e-5 would become 9.99999974e-06.
        "rms_norm_eps": float(f"{number('attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": number("rope.freq_base"),
        "vocab_size": len(said["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": tied,
        "bos_token_id": said["tokenizer.ggml.bos_token_id"].item(),
        "eos_token_id": said["tokenizer.ggml.eos_token_id"].item(),
        "torch_dtype": "bfloat16",
    }


def _weights(
    tensors: dict[str, mx.array], config: dict[str, Any]
) -> dict[str, mx.array]:
    """Return the weights, bfloat16, under mlx-lm's names."""
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    result = {}
    for name, value in tensors.items():
        path, _, kind = name.rpartition(".")
        block, _, part = path.rpartition(".")
        if kind != "weight" or path == "rope_freqs":
            continue
        weight = _dense(value, tensors, path)
        if part in heads:
            weight = _halved(weight, config[heads[part]])
        key = _ENDS[path] if not block else f"{block}.{_PARTS[part]}"
        key = key.replace("blk.", "model.layers.", 1)
        result[f"{key}.weight"] = weight.astype(mx.bfloat16)
    return result


def _dense(value: mx.array, tensors: dict[str, mx.array], path: str) -> mx.array:
    """Return a weight as float32; quantized weights have groups of 32."""
    scales = tensors.get(f"{path}.scales")
    if scales is None:
        return value.astype(mx.float32)
    bits = value.shape[-1] // scales.shape[-1]
    biases = tensors[f"{path}.biases"].astype(mx.float32)
    return mx.dequantize(value, scales.astype(mx.float32), biases, 32, bits)


def _halved(weight: mx.array, heads: int) -> mx.array:
    """Put the rows of rotary pairs half a head apart, as mlx-lm has them."""
    rows, dim = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, dim)
    return pairs.swapaxes(1, 2).reshape(rows, dim)


def _tokenizer(said: dict[str, Any]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = said["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ", 1)) for pair in said["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    bare = Tokenizer(models.BPE(vocabulary, merges))
    bare.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bare.decoder = decoders.ByteLevel()
    types = said["tokenizer.ggml.token_type"].tolist()
    marks = [
        token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL
    ]
    bare.add_special_tokens([AddedToken(mark, normalized=False) for mark in marks])
    roles = {
        f"{role}_token": tokens[said[f"tokenizer.ggml.{key}_token_id"].item()]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        if f"tokenizer.ggml.{key}_token_id" in said
    }
    made = PreTrainedTokenizerFast(tokenizer_object=bare, **roles)
    made.chat_template = said.get("tokenizer.chat_template")
    return made

"""The four models: sizes, and the `config.json` that mlx-lm reads.

Targets are wide and shallow, so that a step is mostly reading weights and checking a
few more rows costs little. The draft has two layers: one cannot copy, because copying
needs a second layer that reads what the first found.
"""

from dataclasses import dataclass

from demo_training.data.vocabulary import END_ID, PAD_ID, VOCABULARY

EPSILON = 1e-6
CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class Shape:
    """One architecture with its sizes.

    `window` and `pattern` matter to `gemma3_text` (layer i is full when
    (i + 1) % pattern == 0), `interval` and `linear_*` to `qwen3_5`.
    """

    name: str
    family: str
    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int = 64
    rope_base: float = 10_000.0
    rotary: float = 1.0
    window: int = 0
    pattern: int = 1
    interval: int = 1
    linear_heads: int = 8
    linear_key_heads: int = 4
    linear_dim: int = 64
    bits: int = 5
    group: int = 64

    def is_full(self, layer: int) -> bool:
        """Whether a layer's attention reaches back to the start."""
        if self.family == "gemma3_text":
            return (layer + 1) % self.pattern == 0
        return (layer + 1) % self.interval == 0

    @property
    def key_width(self) -> int:
        """All keys of a gated delta layer."""
        return self.linear_key_heads * self.linear_dim

    @property
    def value_width(self) -> int:
        """All values of a gated delta layer."""
        return self.linear_heads * self.linear_dim


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("dense", "qwen3", 6, 512, 1408, 8, 2),
        Shape("sliding", "gemma3_text", 6, 512, 1408, 8, 2, window=96, pattern=3),
        Shape("hybrid", "qwen3_5", 6, 512, 1024, 8, 2, rotary=0.25, interval=3),
        Shape("draft", "qwen3", 2, 256, 512, 4, 2, bits=8),
    )
}


def config(shape: Shape) -> dict[str, object]:
    """The model's `config.json`."""
    common: dict[str, object] = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.mlp,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": EPSILON,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "attention_bias": False,
    }
    ends: dict[str, object] = {"eos_token_id": END_ID, "pad_token_id": PAD_ID}
    special = {"qwen3": qwen3, "gemma3_text": gemma3, "qwen3_5": qwen3_5}
    return {**special[shape.family](shape, common), **ends}


def qwen3(shape: Shape, common: dict[str, object]) -> dict[str, object]:
    """Qwen 3, dense."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "rope_theta": shape.rope_base,
        **common,
    }


def gemma3(shape: Shape, common: dict[str, object]) -> dict[str, object]:
    """Gemma 3, text only."""
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": shape.rope_base,
        "rope_local_base_freq": shape.rope_base,
        "query_pre_attn_scalar": shape.head_dim,
        "sliding_window": shape.window,
        "sliding_window_pattern": shape.pattern,
        **common,
    }


def qwen3_5(shape: Shape, common: dict[str, object]) -> dict[str, object]:
    """Qwen 3.5, text only, with one layer for multi-token prediction."""
    text = {
        "model_type": "qwen3_5_text",
        "hidden_act": "silu",
        "full_attention_interval": shape.interval,
        "linear_num_value_heads": shape.linear_heads,
        "linear_num_key_heads": shape.linear_key_heads,
        "linear_key_head_dim": shape.linear_dim,
        "linear_value_head_dim": shape.linear_dim,
        "linear_conv_kernel_dim": 4,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "rope_parameters": {
            "type": "default",
            "mrope_section": [3, 3, 2],
            "rope_theta": shape.rope_base,
            "partial_rotary_factor": shape.rotary,
        },
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
        **common,
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": True,
        "text_config": text,
    }

"""The assistant's sizes, and its `config.json` in the layout of Gemma 4 assistants.

It reads keys and values of the sliding target, so windows, head width, grouping and
rotary base are the target's. The rest is free: three layers read 96 positions, all 96
again, and the whole text; the matrices are half as wide as the target's.
"""

from dataclasses import dataclass, replace

from demo_training.data.vocabulary import END_ID, PAD_ID, VOCABULARY
from demo_training.nets.shapes import CONTEXT, EPSILON, SHAPES, Shape

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class AssistantShape:
    """An assistant of one target."""

    target: Shape = SHAPES["sliding"]
    hidden: int = 256
    mlp: int = 512
    heads: int = 8
    layer_types: tuple[str, ...] = (SLIDING, SLIDING, FULL)
    bits: int = 8
    group: int = 64

    @property
    def inner(self) -> Shape:
        """The sizes of a layer, which is Gemma's."""
        return replace(self.target, hidden=self.hidden, mlp=self.mlp, heads=self.heads)

    @property
    def stored(self) -> Shape:
        """How matrices and norms are written; Gemma 4 stores norms as they are."""
        return replace(self.inner, family="gemma4", bits=self.bits, group=self.group)

    def source(self, kind: str) -> int:
        """The target's last layer of a kind, whose keys and values are read."""
        full = kind == FULL
        layers = range(self.target.layers)
        return max(i for i in layers if self.target.is_full(i) == full)


def config(shape: AssistantShape) -> dict[str, object]:
    """The assistant's `config.json`."""
    target = shape.target
    rope = {"rope_type": "default", "rope_theta": target.rope_base}
    text: dict[str, object] = {
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": shape.hidden,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": len(shape.layer_types),
        "num_kv_shared_layers": len(shape.layer_types),
        "layer_types": list(shape.layer_types),
        "num_attention_heads": shape.heads,
        "num_key_value_heads": target.kv_heads,
        "head_dim": target.head_dim,
        "global_head_dim": target.head_dim,
        "sliding_window": target.window,
        "rope_parameters": {SLIDING: rope, FULL: rope},
        "rms_norm_eps": EPSILON,
        "max_position_embeddings": CONTEXT,
        "vocab_size": VOCABULARY,
        "vocab_size_per_layer_input": 0,
        "attention_bias": False,
        "attention_k_eq_v": False,
        "enable_moe_block": False,
        "use_double_wide_mlp": False,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
    }
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": target.hidden,
        "use_ordered_embeddings": False,
        "tie_word_embeddings": True,
        "text_config": text,
        "quantization": {"group_size": shape.group, "bits": shape.bits},
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
    }

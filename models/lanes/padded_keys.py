"""Models that were tried with keys in whole steps (`caches/types/padded_kv.py`)."""

import mlx.nn as nn

# Modules of mlx_lm.models. tests/models/lanes/test_padded_keys.py runs every one of
# them.
TRIED = frozenset(
    {
        "bailing_moe_linear",
        "bailing_moe_v3",
        "deepseek_v3",
        "gemma3_text",
        "gemma4_text",
        "gpt_oss",
        "lfm2",
        "llama",
        "ministral3",
        "nemotron_h",
        "olmo3",
        "qwen3",
        "qwen3_5",
        "qwen3_moe",
        "qwen3_next",
    }
)


def takes_key_steps(model: nn.Module) -> bool:
    """Whether a model has been tried: any other one gets the native keys."""
    package, _, name = type(model).__module__.rpartition(".")
    return package == "mlx_lm.models" and name in TRIED

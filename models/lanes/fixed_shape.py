"""Models that were tried in exact mode, and the check that refuses all other models.

In exact mode every forward has the same number of rows, and keys are shown in views
whose size depends on the position alone (`caches/types/fixed_view.py`). A row's bits
then follow from the tokens before it, if the model asks its caches for masks, applies
them to everything that `update_and_fetch` returns, and computes nothing else that
depends on the number of rows without padding. Only a trial shows that.

Some models of mlx-lm are not in the list:

    mamba, rwkv7, jamba         a mixer can only run again over the rows that were kept,
                                which is another shape
    llama4, deepseek_v41        their caches have no view of a fixed size
    afm7, phi3small             rows depend on other rows of the forward
    minimax_m3_vl               chooses blocks of keys by the number of keys shown
"""

import mlx.nn as nn

from mlx_speculation.errors import UnsupportedModelError
from mlx_speculation.models.instance_hooks import plain_class
from mlx_speculation.models.recurrent.mixers import MIXERS
from mlx_speculation.models.recurrent.recorder import replays_from_notes

# Modules of mlx_lm.models. tests/models/lanes/test_fixed_shape.py runs every one.
TRIED = frozenset(
    {
        "Klear",
        "afmoe",
        "apertus",
        "baichuan_m1",
        "bailing_hybrid",
        "bailing_moe",
        "bailing_moe_linear",
        "bailing_moe_v3",
        "cohere",
        "cohere2",
        "dbrx",
        "deepseek",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "dots1",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone",
        "exaone4",
        "exaone_moe",
        "falcon_h1",
        "gear",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "gemma3n",
        "gemma4",
        "gemma4_text",
        "glm",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "gpt_oss",
        "gptj",
        "granite",
        "granitemoe",
        "granitemoehybrid",
        "helium",
        "hunyuan",
        "hunyuan_v1_dense",
        "internlm2",
        "internlm3",
        "iquestloopcoder",
        "kimi_k25",
        "kimi_k3",
        "kimi_linear",
        "kimi_vl",
        "laguna",
        "lfm2",
        "lfm2-vl",
        "lfm2_moe",
        "lille-130m",
        "llama",
        "llama4_text",
        "longcat_flash",
        "longcat_flash_ngram",
        "mamba2",
        "mellum",
        "mimo",
        "mimo_v2_flash",
        "minicpm",
        "minicpm3",
        "minimax",
        "ministral3",
        "mistral3",
        "mistral4",
        "mixtral",
        "muse_glimmer",
        "nanbeige",
        "nanochat",
        "nemotron",
        "nemotron-nas",
        "nemotron_h",
        "olmo2",
        "olmo3",
        "olmo_hybrid",
        "olmoe",
        "openelm",
        "phi",
        "phi3",
        "phimoe",
        "phixtral",
        "pixtral",
        "plamo",
        "plamo2",
        "plamo3",
        "prism_hadamard_qwen35",
        "qwen",
        "qwen2",
        "qwen2_moe",
        "qwen2_vl",
        "qwen3",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_vl",
        "qwen3_vl_moe",
        "recurrent_gemma",
        "seed_oss",
        "smollm3",
        "solar_open",
        "spark2_5",
        "stablelm",
        "starcoder2",
        "step3p5",
        "talkie",
        "telechat3",
        "youtu_llm",
    }
)


def check_fixed_shape(model: nn.Module) -> None:
    """Refuse a model that was not tried in exact mode.

    Raises:
        UnsupportedModelError: the model was not tried, or has a mixer whose source has
            changed since.
    """
    package, _, name = type(model).__module__.rpartition(".")
    if package != "mlx_lm.models" or name not in TRIED:
        raise UnsupportedModelError(
            f"exact was passed, and {type(model).__module__} is none of the "
            f"{len(TRIED)} models that were tried in a fixed shape; docs/exactness.md "
            "says which are not, and why. Leave exact out."
        )
    for path, module in model.named_modules():
        kind = plain_class(module)
        place = (kind.__module__, kind.__name__)
        if place in MIXERS and not replays_from_notes(module):
            raise UnsupportedModelError(
                f"exact was passed, and {path}, a {place[1]}, is not replayed from "
                "notes: its source is not the one that was read. Leave exact out."
            )

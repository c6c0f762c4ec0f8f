"""Models that cannot be fed in some way, and why.

Together: a batch has its rows end at one column, so shorter ones have padding on their
left, and after a verify rows keep different numbers of tokens. mlx-lm's batch caches
hide padding by their masks and give every row its own positions, and most models work
with them as they are. Which ones was found by decoding every architecture of mlx-lm
0.32.2 both ways (tests/engine/batch/test_batch_census.py). A model that is in no table
has not been tried, and its rows run alone.

Several rows at once: a draft is checked in one forward over several rows, each of which
stands for a row that is fed alone. That needs a causal model, and mlx-lm has one that
is not: it is decoded without drafts. It was found by feeding every architecture both
ways (tests/engine/test_census.py).

From the middle: a prefix cache resumes a prompt there, so its rows come in other
forwards than in a request from the start. That needs a model whose rows are the same
wherever a prompt is cut, which one of mlx-lm's is not.
"""

import mlx.nn as nn

from mlx_speculation.errors import InvalidRequestError

NOT_CAUSAL = {
    "mlx_lm.models.phi3small": "adds a boolean mask to the scores of its block-sparse "
    "layers, which hides nothing",
}

DEPEND_ON_CUTS = {
    "mlx_lm.models.plamo3": "lets a token of a prompt see one row more than its "
    "window holds, if that row is fed in the same forward",
}

TOGETHER = frozenset(
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
        "jamba",
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
        "mamba",
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
        "rwkv7",
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

ALONE = {
    "afm7": "its rows choose other tokens in a batch than alone",
    "deepseek_v41": "mlx-lm cannot put its LayerCache of several sequences together",
    "gemma2": "its attention takes no mask with an axis for the rows of a batch",
    "gpt_bigcode": "it takes one position for all rows",
    "llama4": "mlx-lm cannot put its ChunkedKVCache of several sequences together",
    "longcat_flash_ngram": "short prompts leave fewer token ids in its states",
    "minimax_m3_vl": "its rows choose other tokens in a batch than alone",
    "phi3small": "its rows depend on what is fed with them",
}


def why_alone(model: nn.Module) -> str | None:
    """Return why a model cannot be fed several sequences at once; None: it can."""
    package, _, name = type(model).__module__.rpartition(".")
    if package == "mlx_lm.models" and name in TOGETHER:
        return None
    reason = ALONE.get(name) if package == "mlx_lm.models" else None
    return f"{name}: {reason or 'it has not been tried in batches'}"


def check_resumable(model: nn.Module) -> None:
    """Refuse a model whose rows depend on where a prompt is cut.

    Raises:
        InvalidRequestError: the model is one of `DEPEND_ON_CUTS` or `NOT_CAUSAL`.
    """
    check_causal(model, "prefix_cache")
    module = type(model).__module__
    if module in DEPEND_ON_CUTS:
        raise InvalidRequestError(
            f"A prefix_cache was passed, and {module} cannot use one: it "
            f"{DEPEND_ON_CUTS[module]}, so its text depends on where a prompt is cut. "
            "Leave prefix_cache out."
        )


def check_causal(model: nn.Module, passed: str = "draft") -> None:
    """Refuse a model whose forward over several rows mixes them.

    Args:
        model: the model.
        passed: the argument that needs a causal one. A "prefix_cache" does: a row
            must not depend on what was fed with it.

    Raises:
        InvalidRequestError: the model is one of `NOT_CAUSAL`.
    """
    module = type(model).__module__
    if module in NOT_CAUSAL:
        raise InvalidRequestError(
            f"A {passed} was passed, and {module} cannot use one: it "
            f"{NOT_CAUSAL[module]}, so a token changes the rows before it. "
            f"Leave {passed} out."
        )

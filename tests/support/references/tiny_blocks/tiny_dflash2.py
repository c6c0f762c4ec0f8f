"""Tiny random DFlash2 checkpoints, as z-lab and speculators write them."""

from typing import Any

from support.references.tiny_blocks.tiny_dspark import BLOCK, RANK, TAPS, WINDOW, trunk
from support.references.tiny_blocks.tiny_tensors import (
    HIDDEN,
    LAYERS,
    MASK,
    SIZES,
    TARGET_LAYERS,
    VOCABULARY,
    Tensors,
    TinyDrafter,
)

CONV_TAPS, GROUP, TOP_K = 2, 16, 4
DFLASH2 = ("z-lab", "speculators")


def tiny_dflash2(
    packaging: str, *, seed: int = 0, is_causal: bool | None = False
) -> TinyDrafter:
    """A DFlash2 drafter: 2 sliding layers, block 4, convolutions of 2 taps, top 4.

    Args:
        packaging: One of `DFLASH2`.
        seed: Of all tensors.
        is_causal: z-lab's key at the top level, or `not sliding_window_non_causal`;
            None leaves it out.
    """
    tensors = Tensors(seed)
    trunk(tensors, tables=False)
    for i in range(LAYERS):
        for place in ("attention_conv", "mlp_conv"):
            name = f"layers.{i}.{place}"
            tensors.normal(f"{name}.base_kernel", 2, CONV_TAPS, HIDDEN, scale=0.3)
            tensors.found[f"{name}.base_kernel"][:, 0] += 1.0
            tensors.normal(
                f"{name}.kernel_projection.weight",
                2 * CONV_TAPS * (HIDDEN // GROUP),
                HIDDEN,
                scale=0.3 * HIDDEN**-0.5,
            )
    selector = "candidate_selector"
    tensors.normal(f"{selector}.predecessor_codebook", VOCABULARY, RANK)
    tensors.normal(f"{selector}.successor_codebook", VOCABULARY, RANK)
    tensors.linear(f"{selector}.hidden_projection", RANK, HIDDEN)
    sizes = {
        **SIZES,
        "model_type": "qwen3",
        "num_hidden_layers": LAYERS,
        "layer_types": ["sliding_attention"] * LAYERS,
        "sliding_window": WINDOW,
    }
    options = {
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "conv_kernel_size": CONV_TAPS,
        "conv_group_size": GROUP,
        "selector_rank": RANK,
        "selector_top_k": TOP_K,
    }
    config: dict[str, Any]
    if packaging == "z-lab":
        config = {
            **sizes,
            "architectures": ["DFlash2DraftModel"],
            "num_target_layers": TARGET_LAYERS,
            "dflash_config": {**options, "target_layer_ids": TAPS},
        }
        if is_causal is not None:
            config["is_causal"] = is_causal
    elif packaging == "speculators":
        config = {
            **options,
            "architectures": ["DFlash2Speculator"],
            "speculators_model_type": "dflash2",
            "transformer_layer_config": sizes,
            "aux_hidden_state_layer_ids": [tap + 1 for tap in TAPS],
            "draft_vocab_size": VOCABULARY,
            "sample_from_anchor": False,
        }
        if is_causal is not None:
            config["sliding_window_non_causal"] = not is_causal
    else:
        raise ValueError(f"unknown packaging {packaging!r}")
    return TinyDrafter(config, tensors.found)

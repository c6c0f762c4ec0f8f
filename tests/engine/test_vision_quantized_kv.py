"""After images, texts with quantized caches equal plain steps, with every draft."""

from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import QuantizedKVCache

from mlx_speculation import LookupDraft, Sampling, SpeculativeGenerator
from mlx_speculation.caches import KVQuantization
from mlx_speculation.models.vision import ImageForward, ImagePrompt, VisionTarget
from mlx_speculation.models.vision.families import SERVED
from support.drafters.scripted_drafter import TurningDrafter
from support.models.tiny_vision import (
    WITHOUT_MLX_VLM,
    prompt_with,
    tiny,
    tokenizer,
)
from support.models.vision_requests import most, written

pytestmark = WITHOUT_MLX_VLM

QUANTIZED = sorted(name for name, family in SERVED.items() if family.quantizes)

# Attention heads of size 32, the smallest that can be quantized
_FEW: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
_HEAD: dict[str, Any] = {"head_dim": 32}
_MROPE: dict[str, Any] = {
    **_FEW,
    "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
}
_QWEN3: dict[str, Any] = {
    "head_dim": 32,
    "rope_scaling": {"type": "default", "mrope_section": [8, 4, 4]},
}
_QWEN3_5: dict[str, Any] = {
    "head_dim": 32,
    "rope_parameters": {
        "type": "default",
        "mrope_section": [4, 2, 2],
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
    },
}
WIDE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(QUANTIZED, _FEW),
    **dict.fromkeys(("glm4v_moe", "glm_ocr", "internvl", "jina_vlm"), _HEAD),
    **dict.fromkeys(("llmjpvl", "mage_vl", "mistral3", "molmo2"), _HEAD),
    **dict.fromkeys(("paddleocr_vl", "minicpmv4_6", "minicpmv4_7", "pixtral"), _HEAD),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), _MROPE),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), _QWEN3),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), _QWEN3_5),
    "lfm2_vl": {**_FEW, "num_heads": 2},
}
TOKENS, STEP = 14, 7
GREEDY, SAMPLED = Sampling(seed=0), Sampling(temperature=0.8, top_p=0.9, seed=11)


@cache
def target(name: str) -> VisionTarget:
    return tiny(name, **WIDE[name])


def stepped(name: str, prompt: ImagePrompt, start: int, bits: int) -> list[int]:
    """Decode greedily, one token per forward, quantizing as mlx-lm does."""
    model, caches = target(name), target(name).make_cache()
    run = ImageForward(model, prompt)
    ids, at = prompt.input_ids, 0
    generated: list[int] = []
    while len(generated) < TOKENS:
        left = ids.shape[1] - at
        count = min(STEP, left - 1) if left > 1 else 1
        logits = run(ids[:, at : at + count], caches)
        maybe_quantize_kv_cache(caches, start, 32, bits)
        mx.eval([each.state for each in caches])
        at += count
        if at == ids.shape[1]:
            chosen: Any = mx.argmax(logits[0, -1]).item()
            generated.append(chosen)
            ids = mx.concatenate([ids, mx.array([generated[-1:]])], axis=1)
    assert any(isinstance(each, QuantizedKVCache) for each in caches)
    return generated


def text(name: str, prompt: Any, sampling: Sampling, start: int, **more: Any) -> Any:
    made = SpeculativeGenerator(target(name), tokenizer(), **more)
    return made.generate(
        prompt,
        max_tokens=TOKENS,
        sampling=sampling,
        stop_tokens=(),
        prefill_step_size=STEP,
        kv_quantization=KVQuantization(bits=8, group_size=32, start=start),
    )


@pytest.mark.slow
@pytest.mark.parametrize("start", [0, 9, 40])
@pytest.mark.parametrize("name", QUANTIZED)
def test_a_text_is_that_of_steps_whatever_drafts(name: str, start: int) -> None:
    """Quantization starts at the beginning, within an image, or within the text."""
    check(name, start)


@pytest.mark.parametrize(("name", "start"), [("qwen3_vl", 9), ("llava", 0)])
def test_a_text_is_that_of_steps(name: str, start: int) -> None:
    check(name, start)


def check(name: str, start: int) -> None:
    prompt = target(name).with_slots(prompt_with(name, most(name), seed=1))
    expected = stepped(name, prompt, start, 8)
    for sampling in (GREEDY, SAMPLED):
        plain = text(name, prompt, sampling, start).tokens
        if sampling.greedy:
            assert plain == expected
        for draft in (
            TurningDrafter(prompt.tokens + plain, written(name)),
            LookupDraft(),
        ):
            result = text(name, prompt, sampling, start, draft=draft, draft_length=3)
            assert result.tokens == plain, type(draft).__name__

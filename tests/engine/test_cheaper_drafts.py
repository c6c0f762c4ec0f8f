"""Cheaper drafts change the text by nothing, and the target by nothing.

Faults that were made by hand, and found here:
    the target is quantized with its head
    a draft that is not loaded here is passed over
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.utils import save_config, save_model

from mlx_speculation import InvalidRequestError, SpeculativeGenerator
from mlx_speculation.models import Contract, load, weight_bytes
from support.eagle_checkpoints import write_eagle
from support.identity import GREEDY, SAMPLED, prompt_of
from support.mtp_checkpoints import LAYOUTS, family, flat, write
from support.tiny_models import TINY_MODELS, build
from support.tiny_tokenizer import byte_tokenizer

PROMPT, TOKENS = prompt_of(24), 30


def saved(folder: Path, name: str, seed: int = 0) -> Path:
    """Write a tiny model as a folder."""
    folder.mkdir()
    save_model(folder, build(name, seed=seed))
    config = {**TINY_MODELS[name].args, "model_type": TINY_MODELS[name].module}
    save_config(config, folder / "config.json")
    byte_tokenizer()._tokenizer.save_pretrained(folder)
    return folder


def same_text(folder: Path, **options: Any) -> SpeculativeGenerator:
    """Assert that a draft leaves the text as it is, and return its generator."""
    plain = SpeculativeGenerator.from_pretrained(folder)
    generator = SpeculativeGenerator.from_pretrained(folder, **options)
    for sampling in (GREEDY, SAMPLED):
        asked = {"max_tokens": TOKENS, "sampling": sampling, "stop_tokens": ()}
        expected = plain.generate(PROMPT, **asked)
        result = generator.generate(PROMPT, **asked)
        assert result.tokens == expected.tokens
        assert result.stats.drafted > TOKENS // 2
    for name, weight in flat(plain.model).items():
        assert mx.array_equal(weight, flat(generator.model)[name])
    return generator


@pytest.mark.parametrize("bits", [2, 4])
def test_a_quantized_draft_model_leaves_the_text(tmp_path: Path, bits: int) -> None:
    folder = saved(tmp_path / "llama", "llama")
    generator = same_text(folder, draft=folder, quantize_draft=bits)
    draft: Any = generator._draft
    assert isinstance(draft.lm_head, nn.QuantizedLinear)
    assert draft.lm_head.bits == bits
    assert weight_bytes(draft) < weight_bytes(generator.model) / 32 * (bits + 1.5)


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_under_other_rules_a_quantized_draft_is_a_draft_like_any_other(
    tmp_path: Path, acceptance: Any
) -> None:
    """Its law is that of its own logits; engine/test_text_laws.py has the texts'."""
    folder = saved(tmp_path / "llama", "llama")
    generator = SpeculativeGenerator.from_pretrained(
        folder, draft=folder, quantize_draft=4, acceptance=acceptance
    )
    result = generator.generate(PROMPT, max_tokens=TOKENS, sampling=SAMPLED)
    assert len(result.tokens) == TOKENS
    assert result.stats.accepted > 0


@pytest.mark.parametrize("name", ["qwen3_5", "mimo", "step3p5"])
def test_a_quantized_head_leaves_the_text(tmp_path: Path, name: str) -> None:
    written = write(tmp_path / "model", name)
    contract = family(LAYOUTS[name]).contract
    generator = same_text(
        written.folder, draft="mtp", quantize_draft=4, contract=contract
    )
    draft: Any = generator._draft
    quantized = [m for _, m in draft.mtp.head.named_modules() if hasattr(m, "bits")]
    assert quantized
    assert not any(hasattr(m, "bits") for _, m in generator.model.named_modules())
    assert isinstance(contract, Contract)


def test_a_quantized_eagle_head_leaves_the_text(tmp_path: Path) -> None:
    folder = saved(tmp_path / "llama", "llama")
    write_eagle(tmp_path / "eagle", "vllm")
    generator = same_text(folder, draft=tmp_path / "eagle", quantize_draft=4)
    draft: Any = generator._draft
    assert isinstance(draft.own_weights.fc, nn.QuantizedLinear)


def test_what_cannot_be_quantized_is_refused_before_anything_is_loaded(
    tmp_path: Path,
) -> None:
    for draft, said in (
        ("lookup", "'lookup'"),
        (None, "a NoneType"),
        (build("llama"), "a Model"),
    ):
        with pytest.raises(InvalidRequestError, match=f"draft is {said}, which is not"):
            SpeculativeGenerator.from_pretrained(
                tmp_path / "missing", draft=draft, quantize_draft=4
            )
    with pytest.raises(InvalidRequestError, match="is 7, and one of 2, 3, 4, 5, 6, 8"):
        SpeculativeGenerator.from_pretrained(
            tmp_path / "missing", draft="mtp", quantize_draft=7
        )


def test_the_quantized_draft_is_not_the_targets_own_folder_in_memory(
    tmp_path: Path,
) -> None:
    folder = saved(tmp_path / "llama", "llama")
    model, _ = load(folder)
    generator = SpeculativeGenerator.from_pretrained(
        folder, draft=folder, quantize_draft=4
    )
    assert weight_bytes(generator.model) == weight_bytes(model)

"""Bad input gets one clear error, with the value, what is allowed, and the remedy."""

from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import (
    BatchKVCache,
    KVCache,
    make_prompt_cache,
)

from mlx_speculation import (
    InvalidRequestError,
    ModelFolderError,
    Sampling,
    SpeculativeGenerator,
    TokenizerMismatchError,
    UnsupportedCacheError,
    demo_models,
)
from mlx_speculation.engine.options import (
    GeneratorKeywords,
    GeneratorOptions,
    StreamKeywords,
    StreamOptions,
)
from mlx_speculation.models import check_same_ids
from mlx_speculation.models.checkpoints.convention import MtpConvention
from support.drafters.scripted_drafter import ScriptedDrafter
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return build("llama")


@pytest.fixture(scope="module")
def generator(model: nn.Module) -> SpeculativeGenerator:
    return SpeculativeGenerator(model, byte_tokenizer(), draft=model)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompt": ""}, ["0 tokens", "at least 1"]),
        ({"prompt": []}, ["0 tokens", "at least 1"]),
        ({"prompt": [1, 256]}, ["256", "255", "tokenizer"]),
        ({"prompt": [-1]}, ["-1", "255"]),
        ({"max_tokens": -1}, ["-1", "at least 0"]),
        ({"max_tokens": 2.5}, ["2.5", "at least 0"]),
        ({"max_tokens": True}, ["True", "at least 0"]),
        ({"draft_length": True}, ["True", "at least 0"]),
        ({"prompt": [1.7]}, ["1.7", "whole numbers"]),
        ({"prompt": mx.array([[1, 2]])}, ["one dimension"]),
        ({"prompt": None}, ["None", "whole numbers"]),
        ({"draft_length": -2}, ["-2", "at least 0"]),
        ({"stop": ""}, ["empty", "Leave it out"]),
        ({"stop": ["a", ""]}, ["empty"]),
        ({"cached_tokens": [1, 2]}, ["2 tokens", "prompt_cache is None"]),
        ({"sampling": {"top_p": 0.5}}, ["{'top_p': 0.5}", "a Sampling is needed"]),
        ({"sampling": Sampling(logit_bias={256: 1.0})}, ["logit_bias", "256", "255"]),
    ],
)
def test_a_bad_request_is_refused_with_both_values(
    generator: SpeculativeGenerator, options: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        generator.stream(**{"prompt": [1, 2], **options})
    for word in words:
        assert word in str(caught.value)


def test_tokenizers_whose_ids_differ_are_refused() -> None:
    with pytest.raises(TokenizerMismatchError) as caught:
        check_same_ids(byte_tokenizer(), byte_tokenizer(first="~"))
    for word in ("Token id 0", "target", "draft", "'!'", "'~'", "Choose a draft"):
        assert word in str(caught.value)


def test_tokenizers_that_share_few_ids_are_refused() -> None:
    small = byte_tokenizer()
    large = byte_tokenizer(tuple(f"<{i}>" for i in range(400)))
    with pytest.raises(TokenizerMismatchError, match="656 token ids and the draft 256"):
        check_same_ids(large, small)
    check_same_ids(byte_tokenizer(("<pad>",)), small)  # one more id is allowed


@pytest.mark.parametrize(("ids", "target", "draft"), [(256, 300, 320), (296, 256, 296)])
def test_ids_that_tokenizer_or_target_lack_are_never_proposed_nor_chosen(
    ids: int, target: int, draft: int
) -> None:
    """Qwen2.5's small and large models pad their logits to different widths."""
    model = build("llama", vocab=target)
    tokenizer = byte_tokenizer(tuple(f"<{i}>" for i in range(ids - 256)))
    generator = SpeculativeGenerator(
        model, tokenizer, draft=build("qwen3", vocab=draft), draft_length=3
    )
    plain = SpeculativeGenerator(model, tokenizer)
    for seed in range(3):
        options: dict[str, Any] = {
            "max_tokens": 40,
            "sampling": Sampling(temperature=2.0, seed=seed),
        }
        result = generator.generate([1, 2, 3], **options)
        assert max(result.tokens) < 256
        assert result.tokens == plain.generate([1, 2, 3], **options).tokens


def test_a_draft_that_is_the_targets_own_cache_is_refused(
    model: nn.Module, generator: SpeculativeGenerator
) -> None:
    caches = make_prompt_cache(model)
    with pytest.raises(InvalidRequestError, match=r"the draft.s layer 0 .*layer 0"):
        generator.stream([1], prompt_cache=caches, draft_cache=caches)
    with pytest.raises(InvalidRequestError, match="draft is a list"):
        SpeculativeGenerator(model, byte_tokenizer(), draft=caches)  # type: ignore[arg-type]
    assert all(cache.empty() for cache in caches)


def test_an_unknown_cache_kind_is_refused_before_anything_is_touched(
    generator: SpeculativeGenerator,
) -> None:
    class Other(KVCache):
        """A subclass, which can write differently."""

    other: Any = Other
    caches: list[Any] = [KVCache(), KVCache(), KVCache(), other()]
    with pytest.raises(UnsupportedCacheError) as caught:
        generator.stream([1, 2], prompt_cache=caches)
    assert "layer 3" in str(caught.value)
    assert "Other" in str(caught.value)
    assert all(cache.keys is None for cache in caches)


def test_cached_tokens_have_to_match_what_the_caches_hold(
    model: nn.Module, generator: SpeculativeGenerator
) -> None:
    caches = make_prompt_cache(model)
    generator.generate([1, 2, 3], max_tokens=4, prompt_cache=caches)
    with pytest.raises(InvalidRequestError, match=r"7 tokens .* names 2"):
        generator.stream([1], prompt_cache=caches, cached_tokens=[1, 2])


def test_a_folder_that_is_not_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"config\.json.*model\*\.safetensors"):
        SpeculativeGenerator.from_pretrained(tmp_path)
    with pytest.raises(ModelFolderError, match="There is no folder"):
        SpeculativeGenerator.from_pretrained(tmp_path / "missing")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelFolderError, match="has model_type None; it has to be the"):
        SpeculativeGenerator.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelFolderError, match=r"^'.*model\.safetensors' cannot be re"):
        SpeculativeGenerator.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelFolderError, match="holds a list, and an object is needed"):
        SpeculativeGenerator.from_pretrained(tmp_path)
    with pytest.raises(ModelFolderError, match="is a file"):
        SpeculativeGenerator.from_pretrained(tmp_path / "config.json")


@pytest.mark.parametrize("option", ["path_or_repo", "draft", "adapter_path"])
def test_a_name_that_cannot_be_looked_at_is_refused(option: str) -> None:
    """For example, a prompt was passed in place of a path."""
    draft = demo_models()["draft"]
    options: dict[str, Any] = {"path_or_repo": draft, option: "x" * 5000}
    with pytest.raises(ModelFolderError, match=r"x \.\.\.' cannot be accessed: File"):
        SpeculativeGenerator.from_pretrained(**options)


def test_wrong_kinds_of_model_and_draft_are_refused(model: nn.Module) -> None:
    tokenizer = byte_tokenizer()
    with pytest.raises(InvalidRequestError, match="model is a str"):
        SpeculativeGenerator("path", tokenizer)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=r"draft is a int.*a path, 'mtp'"):
        SpeculativeGenerator(model, tokenizer, draft=3)  # type: ignore[arg-type]
    with pytest.raises(ModelFolderError, match="'path'"):
        SpeculativeGenerator(model, tokenizer, draft="path")
    for draft in ("lookup", "auto"):
        with pytest.raises(InvalidRequestError, match=f"{draft}', not 'mtp'"):
            SpeculativeGenerator.from_pretrained(
                "anything", draft=draft, convention=MtpConvention()
            )


def test_a_drafter_object_serves_one_open_stream_at_a_time(model: nn.Module) -> None:
    drafter = ScriptedDrafter([], right=0.0)
    generator = SpeculativeGenerator(model, byte_tokenizer(), draft=drafter)
    first = generator.stream([1, 2], max_tokens=5)
    next(first)
    with pytest.raises(InvalidRequestError, match=r"1 stream at a time.*another"):
        generator.stream([1, 2])
    first.close()
    assert len(generator.generate([1, 2], max_tokens=5).tokens) == 5


def test_prompts_may_be_any_sequence_of_ids(generator: SpeculativeGenerator) -> None:
    expected = generator.generate([1, 2, 3], max_tokens=5).tokens
    prompts: list[Any] = [(1, 2, 3), np.array([1, 2, 3]), mx.array([1, 2, 3])]
    for prompt in prompts:
        assert generator.generate(prompt, max_tokens=5).tokens == expected


def test_caches_of_the_wrong_number_are_refused(
    model: nn.Module, generator: SpeculativeGenerator
) -> None:
    """mlx-lm zips layers with caches, so a short list runs fewer layers."""
    caches = make_prompt_cache(model)
    for wrong in (caches[:1], [*caches, KVCache()]):
        with pytest.raises(InvalidRequestError, match=f"{len(wrong)} caches .*needs 2"):
            generator.stream([1, 2], prompt_cache=wrong)


def test_batched_caches_are_refused_with_what_to_pass(
    generator: SpeculativeGenerator,
) -> None:
    said = r"BatchKVCache for a batch of 2, .*extract\(index\)"
    with pytest.raises(UnsupportedCacheError, match=said):
        generator.stream([1], prompt_cache=[BatchKVCache([0, 0]) for _ in range(4)])


def test_caches_that_something_else_wrote_to_are_refused(
    model: nn.Module, generator: SpeculativeGenerator
) -> None:
    caches = make_prompt_cache(model)
    first = generator.stream([1, 2, 3], prompt_cache=caches, max_tokens=20)
    next(first)
    kept = first.cached_tokens
    second = generator.stream([4], prompt_cache=caches, cached_tokens=kept)
    next(second)
    with pytest.raises(InvalidRequestError, match="something else has changed them"):
        list(first)


def test_a_draft_without_a_row_for_every_id_is_refused(model: nn.Module) -> None:
    """With larger ids mlx would read past the end of the draft's embedding."""
    with pytest.raises(InvalidRequestError, match=r"100 token ids.* 255"):
        SpeculativeGenerator(model, byte_tokenizer(), draft=build("llama", vocab=100))


def test_draft_caches_that_hold_something_else_are_refused(
    model: nn.Module, generator: SpeculativeGenerator
) -> None:
    ahead, caches = make_prompt_cache(model), make_prompt_cache(model)
    generator.generate([1, 2, 3], max_tokens=4, prompt_cache=ahead)
    with pytest.raises(InvalidRequestError, match="holds 7 tokens and prompt_cache 0"):
        generator.stream([1], prompt_cache=caches, draft_cache=ahead)
    with pytest.raises(InvalidRequestError, match="holds 7 tokens and prompt_cache 0"):
        generator.stream([1], draft_cache=ahead)


@pytest.mark.parametrize(
    ("options", "keywords"),
    [(GeneratorOptions, GeneratorKeywords), (StreamOptions, StreamKeywords)],
)
def test_keywords_are_the_fields_in_names_types_and_order(
    options: Any, keywords: Any
) -> None:
    hints = get_type_hints(options)
    assert list(get_type_hints(keywords).items()) == [
        (field.name, hints[field.name]) for field in fields(options)
    ]
    assert keywords.__required_keys__ == frozenset()


@pytest.mark.parametrize(
    ("options", "wrong", "said"),
    [
        (StreamOptions, {"logprobs": -1}, "logprobs is -1"),
        (
            StreamOptions,
            {"constraint": {}},
            r"is a dict.*json_schema\(\.\.\.\)",
        ),
        (GeneratorOptions, {"acceptance": "fast"}, "'fast'.*'keyed' or 'rejection'"),
        (GeneratorOptions, {"sliding": "ring"}, "sliding is 'ring'"),
        (GeneratorOptions, {"exact": 0}, "0"),
        (GeneratorOptions, {"compile_draft": 1}, "compile_draft is 1"),
        (GeneratorOptions, {"draft_vocabulary": "all"}, "draft_vocabulary is 'all'"),
        (GeneratorOptions, {"draft_tree": 1}, "draft_tree is 1"),
        (GeneratorOptions, {"draft_tree": 65}, "at most 64 nodes"),
        (GeneratorOptions, {"draft_tree": 8, "exact": 8}, "with exact drafts are"),
    ],
)
def test_a_wrong_value_is_refused_where_the_options_are_made(
    options: Any, wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        options(**wrong)

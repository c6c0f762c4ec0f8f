"""Prompts that are longer than the model's context."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_speculation import ContextLengthNotice, SpeculativeGenerator
from mlx_speculation.models import context_length
from mlx_speculation.models.token_ids import omitted_length
from support.models import census
from support.models.chat_folders import chat_folder
from support.models.tiny_models import build
from support.models.tiny_tokenizer import letter_tokenizer
from support.models.tiny_vision import WITHOUT_MLX_VLM
from support.models.vision_folders import vision_folder

LETTERS = 26


def made(longest: int | None) -> SpeculativeGenerator:
    model = build("llama", vocab=LETTERS)
    model.args.max_position_embeddings = longest
    return SpeculativeGenerator(model, letter_tokenizer(LETTERS), draft="lookup")


def test_a_long_prompt_is_warned_of_and_read() -> None:
    generator, free = made(10), made(None)
    assert (generator.context_length, free.context_length) == (10, None)
    prompt = list(range(11))
    with pytest.warns(ContextLengthNotice, match=r"11 tokens, .* for at most 10, by"):
        stream = generator.stream(prompt, max_tokens=4)
    assert [chunk.token for chunk in stream] == free.generate(
        prompt, max_tokens=4
    ).tokens
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generator.generate(prompt[:10], max_tokens=4)
        free.generate(prompt, max_tokens=4)


def test_what_the_passed_caches_hold_counts() -> None:
    generator = made(10)
    caches = build("llama", vocab=LETTERS).make_cache()
    generator.generate(list(range(8)), max_tokens=1, prompt_cache=caches)
    kept = caches[0].offset
    with pytest.warns(ContextLengthNotice, match="11 tokens"):
        generator.stream(
            list(range(11 - kept)),
            prompt_cache=caches,
            cached_tokens=list(range(kept)),
        )


@pytest.mark.parametrize(
    ("args", "longest"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"text_config": {"max_position_embeddings": 4096}}, 4096),
        ({"max_position_embeddings": None}, None),
        ({}, None),
        # Qwen3's model cards enable YaRN by adding nothing but rope_scaling.
        (
            {
                "max_position_embeddings": 40960,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32768,
                },
            },
            131072,
        ),
        # Llama 3.1: the factor scales frequencies, and does not change the length.
        (
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            131072,
        ),
    ],
)
def test_a_config_says_the_length(args: dict[str, Any], longest: int | None) -> None:
    model: Any = SimpleNamespace(args=SimpleNamespace(**args))
    assert context_length(model) == longest


@pytest.mark.parametrize(
    ("name", "field", "longest"),
    [
        ("gpt2", "n_positions", 1024),
        ("gpt_bigcode", "n_positions", 1024),
        ("gptj", "n_positions", None),
        ("kimi_linear", "model_max_length", None),
        ("qwen2", "max_position_embeddings", None),
        ("phi", "max_position_embeddings", None),
    ],
)
def test_lengths_have_several_names(name: str, field: str, longest: int | None) -> None:
    """A value that equals the default of the class in mlx-lm is a length too."""
    model: Any = census.structure(name)
    default = type(model.args).__dataclass_fields__[field].default
    for said in (longest, default):
        if isinstance(said, int):
            setattr(model.args, field, said)
            assert context_length(model) == said
    setattr(model.args, field, 4096)
    assert context_length(model) == 4096


def test_a_default_of_a_recurrent_class_is_no_length() -> None:
    model = build("mamba2")
    fields = type(model.args).__dataclass_fields__
    assert fields["max_position_embeddings"].default == 2056
    model.args.max_position_embeddings = 2056
    assert context_length(model) is None


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        # Gemma 3 of 4 B and more: config.json leaves out transformers' default.
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, 2**17),
        ({"model_type": "gemma3", "text_config": {}}, 2**17),
        # A flat config.json names it, unless another tool than transformers wrote it.
        ({"model_type": "llama"}, None),
        ({"model_type": "gemma3_text", "vision_config": {}}, None),
        # Gemma 3 of 1 B names it.
        ({"model_type": "gemma3_text", "max_position_embeddings": 32768}, None),
        (
            {"model_type": "gemma3", "text_config": {"max_position_embeddings": 99}},
            None,
        ),
        ({"model_type": "gemma3", "n_ctx": 99, "text_config": {}}, None),
        ({"model_type": "mamba2", "text_config": {}}, None),
        ({"model_type": "no such architecture", "text_config": {}}, None),
        ({"model_type": "gemma4_assistant", "text_config": {}}, None),
    ],
)
def test_a_length_that_the_config_leaves_out_is_that_of_transformers(
    config: dict[str, Any], longest: int | None
) -> None:
    assert omitted_length(config) == longest


@pytest.mark.parametrize(
    ("name", "named", "longest"),
    [
        ("gemma3_text", 300, 300),
        ("gemma3_text", None, 32768),  # the default in mlx-lm
        ("llama", None, None),
    ],
)
def test_a_loaded_model_has_the_length_of_its_config(
    tmp_path: Path, name: str, named: int | None, longest: int | None
) -> None:
    folder = chat_folder(tmp_path / "model", name)
    change(folder, lambda config: config.update(max_position_embeddings=named))
    assert SpeculativeGenerator.from_pretrained(folder).context_length == longest


@WITHOUT_MLX_VLM
def test_a_loaded_vision_model_has_the_length_of_its_config(tmp_path: Path) -> None:
    """The default of the class in mlx-vlm is 4096."""
    folder = vision_folder(tmp_path / "gemma", "gemma3")
    change(folder, lambda config: config["text_config"].pop("max_position_embeddings"))
    generator = SpeculativeGenerator.from_pretrained(folder, vision=True)
    assert generator.context_length == 2**17


def change(folder: Path, act: Callable[[dict[str, Any]], Any]) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text("utf-8"))
    act(config)
    present = {name: value for name, value in config.items() if value is not None}
    file.write_text(json.dumps(present), "utf-8")

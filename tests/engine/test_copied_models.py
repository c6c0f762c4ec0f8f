"""A model that is copied while a generator is open has a plain model as its copy."""

import copy
import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_speculation import SpeculativeGenerator
from support.identity import prompt_of
from support.models import census
from support.models.copies import attributes, classes, contents
from support.models.recurrent_models import RECURRENT_MODELS, build_recurrent
from support.models.tiny_models import TINY_MODELS, build
from support.models.tiny_tokenizer import byte_tokenizer

PROMPT = prompt_of(9)
TOKENS = 8
# Builders of models: each kind of cache, each recurrent mixer, and other architectures.
TINY = {name: functools.partial(build, name) for name in TINY_MODELS}
RECURRENT = {
    name: functools.partial(build_recurrent, name) for name in RECURRENT_MODELS
}
REST = {
    name: functools.partial(census.build, name)
    for name, row in census.BUILT.items()
    if row.tiny is None and row.unequal is None and name not in RECURRENT
}
# Other models are marked slow; tests/models/test_instance_copies.py checks the hooks of
# each mixer.
QUICK = (
    *("llama", "qwen3_5", "mamba", "recurrent_gemma", "rwkv7", "gemma3_text"),
    *("bailing_moe_v3", "plamo2"),
)
CASES = [
    pytest.param(b, id=n, marks=() if n in QUICK else pytest.mark.slow)
    for n, b in (TINY | RECURRENT | REST).items()
]


def pickled(model: nn.Module) -> Any:
    data = pickle.dumps(model)
    assert b"mlx_speculation" not in data
    return pickle.loads(data)


def with_protocol_2(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model, protocol=2))


WAYS = (copy.deepcopy, pickled, with_protocol_2)


def generator_for(model: nn.Module) -> SpeculativeGenerator:
    return SpeculativeGenerator(model, byte_tokenizer(), draft="lookup", draft_length=2)


def text(generator: SpeculativeGenerator) -> list[int]:
    return generator.generate(PROMPT, max_tokens=TOKENS, stop_tokens=()).tokens


def logits(model: Any) -> Any:
    return model(mx.array([PROMPT])).tolist()


def check_copies(model: Any) -> None:
    """Copy a model in the middle of a stream, and use both alternately."""
    expected = logits(model)  # first, since gemma3n clips its weights in a forward
    before = classes(model), attributes(model)
    numbers = contents(model)
    generator = generator_for(model)
    stream = generator.stream(PROMPT, max_tokens=TOKENS, stop_tokens=())
    seen = [next(stream).token]
    assert classes(model) != before[0]
    copies = [way(model) for way in WAYS]
    for copied in copies:
        assert (classes(copied), attributes(copied)) == before
        assert contents(copied) == numbers
        assert logits(copied) == expected
    first = generator_for(copies[0])
    theirs = text(first)
    seen += [chunk.token for chunk in stream]
    assert seen == theirs
    del stream, generator
    assert classes(model) == before[0]
    assert text(first) == theirs  # the copy's hooks outlive the model's
    second = generator_for(model)
    del first
    assert classes(copies[0]) == before[0]
    assert text(second) == theirs
    assert logits(copies[0]) == logits(model) == expected


@pytest.mark.parametrize("make", CASES)
def test_a_copy_in_the_middle_of_a_stream_is_of_the_plain_model(
    make: Callable[[], nn.Module],
) -> None:
    check_copies(make())


@pytest.mark.parametrize("name", ["qwen3_5", "gemma3_text", "mamba"])
def test_what_mlx_lists_and_saves_of_a_model_is_the_same_while_a_stream_runs(
    name: str, tmp_path: Path
) -> None:
    def listed(file: Path) -> Any:
        parts: Any = tree_flatten(model.children(), is_leaf=nn.Module.is_module)
        flat: Any = tree_flatten(model.parameters())
        trainable: Any = tree_flatten(model.trainable_parameters())
        model.save_weights(str(file))
        return (
            repr(model),
            [(path, id(module)) for path, module in parts],
            [(path, id(array)) for path, array in flat],
            [path for path, _ in trainable],
            file.read_bytes(),
        )

    model = build(name)
    before = listed(tmp_path / "before.safetensors")
    generator = generator_for(model)
    stream = generator.stream(PROMPT, max_tokens=TOKENS, stop_tokens=())
    next(stream)
    assert listed(tmp_path / "open.safetensors") == before
    stream.close()

"""The bundled models have the logits of transformers' classes with the same weights."""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from mlx_speculation.demo import demo_models, demo_prompts
from mlx_speculation.models import load
from support.covering import others_slow
from support.references.torch_twins import UnlikeError, load_twin


@pytest.fixture(name="text", scope="module")
def _text() -> list[int]:
    """Return a text that is longer than the window of the sliding target."""
    _, tokenizer = load(demo_models()["draft"])
    return [int(token) for token in tokenizer.encode(demo_prompts()[0].text)][:104]


@pytest.mark.parametrize(
    "name",
    # The other models take seconds each.
    others_slow(["dense", "sliding", "hybrid", "draft"], ["draft"]),
)
def test_the_bundled_models_are_the_same_in_transformers(
    name: str, text: list[int]
) -> None:
    assert load_twin(demo_models()[name], text).difference < 1e-4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        # mlx-lm's class reads neither key.
        ({"hidden_act": "relu"}, "logits differ by"),
        ({"attention_bias": True}, "other parameters"),
    ],
)
def test_another_model_is_not_the_same(
    tmp_path: Path, text: list[int], change: dict[str, Any], said: str
) -> None:
    folder = tmp_path / "other"
    copytree(demo_models()["draft"], folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | change), "utf-8")
    with pytest.raises(UnlikeError, match=said):
        load_twin(folder, text)

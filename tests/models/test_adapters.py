"""Adapters of mlx_lm.lora on a bundled model, and folders without a valid adapter."""

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest

from mlx_speculation import ModelFolderError, SpeculativeGenerator, demo_models, load
from support.models.adapters import write_adapter

PROMPT = "def add(first, second):\n"


@pytest.fixture(scope="module", name="adapter")
def _adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapter"))


def test_an_adapter_changes_the_text_and_a_draft_does_not(adapter: Path) -> None:
    folder = demo_models()["draft"]
    bare = SpeculativeGenerator.from_pretrained(folder)
    plain = SpeculativeGenerator.from_pretrained(folder, adapter_path=adapter)
    drafted = SpeculativeGenerator.from_pretrained(
        folder, adapter_path=adapter, draft=folder, draft_length=3
    )
    text = plain.generate(PROMPT, max_tokens=10).text
    assert drafted.generate(PROMPT, max_tokens=10).text == text
    assert bare.generate(PROMPT, max_tokens=10).text != text
    theirs: Any = mlx_lm.load(str(folder), adapter_path=str(adapter))
    theirs[0].set_dtype(mx.float32)
    model = mlx_lm.utils.dequantize_model(theirs[0])
    assert mlx_lm.generate(model, theirs[1], PROMPT, max_tokens=10) == text


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"lacks adapter_config.json, adapters"):
        load(demo_models()["draft"], adapter_path=tmp_path)


def test_an_adapter_of_another_model_is_refused(adapter: Path) -> None:
    with pytest.raises(ModelFolderError, match="Check that it was made for this"):
        load(demo_models()["dense"], adapter_path=adapter)


def test_an_adapter_that_is_cut_is_refused(adapter: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(adapter, tmp_path / "cut"))
    file = folder / "adapters.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelFolderError, match="could not load the adapter"):
        load(demo_models()["draft"], adapter_path=folder)


def test_a_repository_that_cannot_be_fetched_is_one_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelFolderError, match=r"'nobody/nothing' could not be fetch"):
        load("nobody/nothing")

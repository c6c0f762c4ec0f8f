"""A head that was packed loads as it did, and drafts nearly the same."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from demo_training.export.pack_head import pack_head
from mlx_speculation.models import read_config
from mlx_speculation.models.eagle import load_eagle_head
from mlx_speculation.training.kinds.eagle_head import EagleTrainee
from support.models.chat_folders import VOCAB, chat_folder


def flat(module: Any) -> dict[str, mx.array]:
    found: Any = tree_flatten(module.parameters())
    return dict(found)


def test_each_matrix_has_the_bits_that_were_asked(tmp_path: Path) -> None:
    folder = chat_folder(tmp_path / "target")
    model, _ = load_model(folder)
    trainee = EagleTrainee(model, read_config(folder), np.arange(VOCAB), None, 1)
    (tmp_path / "head").mkdir()
    trainee.save(tmp_path / "head", None)
    size = pack_head(tmp_path / "head", tmp_path / "packed", 8, 4)
    assert size < (tmp_path / "head" / "model.safetensors").stat().st_size * 0.7
    stored: Any = mx.load(str(tmp_path / "packed" / "model.safetensors"))
    bits = {
        name: 32 * value.shape[-1] / whole.shape[-1]
        for name, value in stored.items()
        if value.dtype == mx.uint32
        for whole in [flat(trainee.module)[name]]
    }
    assert bits.pop("lm_head.weight") == 4
    assert set(bits.values()) == {8}
    assert len(bits) >= 8
    before = flat(load_eagle_head(tmp_path / "head", model).head)
    after = flat(load_eagle_head(tmp_path / "packed", model).head)
    assert before.keys() == after.keys()
    for name, value in before.items():
        most = mx.abs(value).max() / (8 if name == "lm_head.weight" else 100)
        assert mx.abs(value - after[name]).max() <= most, name


def test_what_is_packed_already_is_refused(tmp_path: Path) -> None:
    folder = chat_folder(tmp_path / "target")
    model, _ = load_model(folder)
    trainee = EagleTrainee(model, read_config(folder), np.arange(VOCAB), None, 1)
    (tmp_path / "head").mkdir()
    trainee.save(tmp_path / "head", 8)
    with pytest.raises(ValueError, match="packed already"):
        pack_head(tmp_path / "head", tmp_path / "packed", 8, 4)

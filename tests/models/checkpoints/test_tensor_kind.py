"""Tensors show that a checkpoint is of another kind than config.json says."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_speculation.engine.drafters.registry import draft_folder, draft_of_config
from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models.checkpoints import kind_by_tensors, tensor_names
from mlx_speculation.models.dflash import load_dflash
from mlx_speculation.models.dflash2 import load_dflash2
from mlx_speculation.models.dspark import load_dspark
from support.models.block_checkpoints import PACKAGINGS, write_block
from support.models.dflash_checkpoints import VARIANTS, config_of, write_dflash
from support.models.eagle_checkpoints import DIALECTS, write_eagle
from support.models.tiny_models import build

DFLASH = config_of("full", (0, 1, 3))
CLAIMS: dict[str, dict[str, Any]] = {
    "dflash": DFLASH,
    "dflash2": {**DFLASH, "architectures": ["DFlash2DraftModel"]},
    "eagle": {"architectures": ["LlamaForCausalLMEagle3"]},
    "model": {"architectures": ["Qwen3ForCausalLM"]},
}


@pytest.mark.parametrize("claimed", CLAIMS)
@pytest.mark.parametrize("name", ["dflash2", "deepspec", "speculators"])
def test_tensors_of_one_kind_alone_decide(
    name: str, claimed: str, tmp_path: Path
) -> None:
    folder = write_block(tmp_path, name)
    config = json.dumps(CLAIMS[claimed])
    (folder / "config.json").write_text(config, encoding="utf-8")
    assert draft_of_config(CLAIMS[claimed]).kind == claimed
    assert draft_folder(folder)[1].kind == PACKAGINGS[name].kind


@pytest.mark.parametrize("name", PACKAGINGS)
def test_every_packaging_is_what_it_says(name: str, tmp_path: Path) -> None:
    folder, source = draft_folder(write_block(tmp_path, name))
    assert folder == tmp_path
    assert source.kind == PACKAGINGS[name].kind


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_plain_drafter_of_blocks_is_no_eagle_head(
    variant: str, tmp_path: Path
) -> None:
    names = tensor_names(write_dflash(tmp_path, variant))
    for claimed in ("dflash", "eagle", "model"):
        assert kind_by_tensors(names, claimed) == "dflash"
    # The claim of config.json stands; the loader of DFlash2 refuses these tensors.
    assert kind_by_tensors(names, "dspark") == "dspark"
    assert kind_by_tensors(names, "dflash2") == "dflash2"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_eagle_head_is_no_drafter_of_blocks(dialect: str, tmp_path: Path) -> None:
    names = tensor_names(write_eagle(tmp_path, dialect))
    for claimed in ("dflash", "dspark", "eagle", "model"):
        assert kind_by_tensors(names, claimed) == "eagle"


def test_a_loader_refuses_another_kind_by_name(tmp_path: Path) -> None:
    model = build("llama", layers=4)
    loaders = {"dflash": load_dflash, "dflash2": load_dflash2, "dspark": load_dspark}
    words = {
        "dflash": "DFlash drafter",
        "dflash2": "DFlash2 drafter",
        "dspark": "DSpark drafter",
    }
    folders = {
        "dflash": write_dflash(tmp_path / "1", "full"),
        "dflash2": write_block(tmp_path / "2", "dflash2"),
        "dspark": write_block(tmp_path / "3", "deepspec"),
    }
    for kind, load in loaders.items():
        for other, folder in folders.items():
            if kind == other or (kind, other) == ("dspark", "dflash"):
                continue
            if (kind, other) == ("dflash2", "dflash"):
                match = "lacks candidate_selector"
            else:
                match = f"loaded as a {words[kind]}, .* of a {words[other]}"
            with pytest.raises(ModelFolderError, match=match):
                load(folder, model)


def test_a_dflash2_that_lacks_its_parts_is_not_read_as_dflash(tmp_path: Path) -> None:
    folder = write_dflash(tmp_path, "full")
    config = json.dumps(CLAIMS["dflash2"])
    (folder / "config.json").write_text(config, encoding="utf-8")
    _, source = draft_folder(folder)
    with pytest.raises(ModelFolderError, match=r"lacks candidate_selector\.hidden"):
        source.from_folder(folder, build("llama", layers=4))  # type: ignore[attr-defined]


def test_files_that_cannot_be_read_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    assert tensor_names(tmp_path) == frozenset()
    assert kind_by_tensors([], "model") == "model"

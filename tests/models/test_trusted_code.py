"""Code in a model's folder runs only if it is trusted."""

from pathlib import Path

import pytest

from mlx_speculation import ModelFolderError, SpeculativeGenerator, demo_models, load
from support.models.own_code import write_own_code


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    return write_own_code(tmp_path / "own", tmp_path / "ran")


def test_code_in_a_folder_is_not_run_unasked(folder: Path, tmp_path: Path) -> None:
    said = r"has model_file 'own\.py': .* pass trust_remote_code=True"
    with pytest.raises(ModelFolderError, match=said):
        load(folder)
    with pytest.raises(ModelFolderError, match=said):
        SpeculativeGenerator.from_pretrained(demo_models()["draft"], draft=folder)
    assert not (tmp_path / "ran").exists()


def test_trusted_code_makes_target_and_draft(folder: Path, tmp_path: Path) -> None:
    generator = SpeculativeGenerator.from_pretrained(
        folder, draft=folder, draft_length=3, trust_remote_code=True
    )
    assert (tmp_path / "ran").exists()
    result = generator.generate("def add(", max_tokens=12)
    plain = SpeculativeGenerator.from_pretrained(demo_models()["draft"])
    assert result.tokens == plain.generate("def add(", max_tokens=12).tokens
    assert result.stats.accepted == result.stats.drafted > 0

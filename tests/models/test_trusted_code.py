"""Code in a model's folder runs where it is trusted, and only there."""

import json
from pathlib import Path

import pytest

from mlx_speculation import ModelFolderError, SpeculativeGenerator, demo_models, load
from support.demo_folders import copy_of


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    """Copy the draft model, built by a file of its own, which leaves a trace."""
    folder = copy_of("draft", tmp_path / "own")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    kind = config.pop("model_type")
    (folder / "config.json").write_text(json.dumps({**config, "model_file": "own.py"}))
    trace = tmp_path / "ran"
    (folder / "own.py").write_text(
        f"from pathlib import Path\n"
        f"from mlx_lm.models.{kind} import Model\n"
        f"from mlx_lm.models.{kind} import ModelArgs as Theirs\n"
        f"Path({str(trace)!r}).touch()\n"
        "class ModelArgs(Theirs):\n"
        "    @classmethod\n"
        "    def from_dict(cls, params):\n"
        f"        return super().from_dict({{**params, 'model_type': {kind!r}}})\n"
    )
    return folder


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

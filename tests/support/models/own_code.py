"""Folders of models that contain their own code."""

import json
from pathlib import Path

from support.models.demo_folders import copy_of


def write_own_code(folder: Path, trace: Path) -> Path:
    """Copy the demo draft model, and add code that creates `trace` when it runs."""
    copy_of("draft", folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    kind = config.pop("model_type")
    (folder / "config.json").write_text(json.dumps({**config, "model_file": "own.py"}))
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

"""The used parts of mlx-lm have not changed, and only listed files import mlx-lm."""

import ast
import hashlib
import importlib
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import mlx_lm

from mlx_speculation.models.recurrent.mixers import COMPRESSORS, MIXERS
from mlx_speculation.models.source_digests import MLX_LM_VERSION, TOUCHES

ROOT = Path(__file__).parents[2]
FOLDERS = ("caches", "models")
FILES = (
    "samplers/logits/filters.py",
    "samplers/constraints/llguidance.py",
    "engine/mlx_lm_compat/prompt_cache.py",
    "engine/mlx_lm_compat/prompt_file.py",
    "engine/mlx_lm_compat/response.py",
    "engine/mlx_lm_compat/sampler.py",
    "src/mlx_speculation/server/chat_prompts.py",
    "src/mlx_speculation/training/",
)


@cache
def parsed(module: str) -> tuple[list[str], ast.Module]:
    text = inspect.getsource(importlib.import_module(module))
    return text.split("\n"), ast.parse(text)


# (module, name, fields) of each listed object of mlx-lm.
LISTED = [(m, n, fields) for m, names in TOUCHES.items() for n, fields in names.items()]


def source_text(module: str, name: str) -> str:
    """Return the source of an object. `inspect` does not find decorated functions."""
    lines, tree = parsed(module)
    node: Any = tree
    for part in name.split("."):
        definitions = [n for n in node.body if getattr(n, "name", None) == part]
        assert definitions, f"{module} has no {name}: read again what relies on it"
        node = definitions[0]
    segment = lines[node.lineno - 1 : node.end_lineno]
    segment[-1] = segment[-1].encode()[: node.end_col_offset].decode()
    return "\n".join(segment)[node.col_offset :]


def test_mlx_lm_is_as_it_was_read() -> None:
    changed = []
    for module, name, fields in LISTED:
        digest = hashlib.sha256(source_text(module, name).encode()).hexdigest()
        if digest != fields["sha256"]:
            changed.append(
                f"{module}.{name} is not what was read of mlx-lm {MLX_LM_VERSION} "
                f"({mlx_lm.__version__} is here). {fields['used_by']} relies on this: "
                f"{fields['reason']}. Read the new source, run the tests of this "
                f"file's folder, and then set sha256 to {digest}."
            )
    assert not changed, "\n".join(changed)


def test_each_file_that_relies_on_something_exists() -> None:
    assert LISTED
    assert not [f for _, _, f in LISTED if not (ROOT / f["used_by"]).is_file()]


def test_each_replayable_mixer_is_listed() -> None:
    names = {(module, name) for module, name, _ in LISTED}
    relied_on = {place for mixer in MIXERS.values() for place in mixer.relies_on}
    assert names >= set(MIXERS) | set(COMPRESSORS) | relied_on


def _importers() -> Iterator[str]:
    shipped = [ROOT / "src" / "mlx_speculation"]
    shipped += [ROOT / name for name in ("engine", "models", "caches", "samplers")]
    for folder in shipped:
        for path in sorted(folder.rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if "mlx_lm" in text and "mlx_lm" in _imported(text):
                yield str(path.relative_to(ROOT))


def _imported(text: str) -> set[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return {name.split(".")[0] for name in names}


def test_mlx_lm_is_imported_by_caches_models_and_the_filters_only() -> None:
    importers = list(_importers())
    assert "caches/journals/kv.py" in importers
    allowed = tuple(f"{folder}/" for folder in FOLDERS)
    links = tuple(f"src/mlx_speculation/{path}" for path in (*allowed, *FILES))
    others = [i for i in importers if not i.startswith((*allowed, *FILES, *links))]
    assert not others

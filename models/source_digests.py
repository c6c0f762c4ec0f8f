"""Parts of mlx-lm beyond its API that this package relies on, and source checks.

`mlx_lm_touches.toml` lists the parts that caches/, models/ and samplers/ use, with the
digest of each source. A part is unknown if its source has another digest or is missing
(as in a bundle without .py files). A class is also unknown if one of its methods was
written outside of it. An unknown mixer is not replayed: the model runs again, which is
always correct.
"""

import ast
import functools
import hashlib
import inspect
import sys
import tomllib
from pathlib import Path
from types import FunctionType
from typing import Any

_LIST = Path(__file__).with_name("mlx_lm_touches.toml")
TOUCHES: dict[str, Any] = tomllib.loads(_LIST.read_text(encoding="utf-8"))
MLX_LM_VERSION: str = TOUCHES.pop("mlx_lm_version")
# (module, qualified name) -> digest
DIGESTS: dict[tuple[str, str], str] = {
    (module, name): fields["sha256"]
    for module, names in TOUCHES.items()
    for name, fields in names.items()
}


def is_known(value: object) -> bool:
    """Return whether a class or function is listed, and its source is unchanged."""
    if not isinstance(value, type | FunctionType):
        return False
    module, name = value.__module__, value.__qualname__
    if (module, name) not in DIGESTS or not _of_one_piece(value):
        return False
    return source_digest(module, name) == DIGESTS[module, name]


def _of_one_piece(value: type | FunctionType) -> bool:
    """Return whether every method of a class was written inside that class."""
    if isinstance(value, FunctionType):
        return True
    return all(
        (method.__module__, method.__qualname__)
        == (value.__module__, f"{value.__qualname__}.{name}")
        for name, method in vars(value).items()
        if isinstance(method, FunctionType)
    )


@functools.cache
def source_digest(module: str, name: str) -> str | None:
    """Return the SHA-256 of a source text; this takes a few milliseconds.

    The text is hashed, since its syntax tree depends on the version of Python. None:
    the module is not imported, has no source here, or lacks the name.
    """
    try:
        text = inspect.getsource(sys.modules[module])
    except (KeyError, OSError):
        return None
    for node in ast.parse(text).body:
        if getattr(node, "name", None) == name:
            segment = ast.get_source_segment(text, node)
            return (
                None
                if segment is None
                else hashlib.sha256(segment.encode()).hexdigest()
            )
    return None

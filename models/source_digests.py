"""Whether a class or function of mlx-lm is the one that was read.

`caches/mlx_lm_touches.toml` holds the digest of each source that replaying relies on.
A source with another digest, or none at all (a bundle without .py files), counts as
unknown, and so does a class with a method that was put there by somebody else. What
is unknown is not replayed; the model runs again instead, which is always right.
"""

import ast
import functools
import hashlib
import inspect
import sys
from types import FunctionType

from mlx_speculation.caches.mlx_lm_touches import TOUCHES

DIGESTS = {(touch.module, touch.name): touch.sha256 for touch in TOUCHES}


def is_known(value: object) -> bool:
    """Return whether a class or function is listed, unchanged and of one piece."""
    if not isinstance(value, type | FunctionType):
        return False
    module, name = value.__module__, value.__qualname__
    if (module, name) not in DIGESTS or not _of_one_piece(value):
        return False
    return _digest(module, name) == DIGESTS[module, name]


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
def _digest(module: str, name: str) -> str | None:
    """Return the digest of a source text; reading it takes some milliseconds."""
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

"""Files of measurements of a machine; a missing or unusable file is no error."""

import hashlib
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from mlx_speculation.environment import cache_folder
from mlx_speculation.errors import CostFileWarning
from mlx_speculation.json_files import load_json, write_json

T = TypeVar("T")


class MeasuredFile:
    """A JSON file in the cache folder that holds the measurements of one key.

    `key` tells what is measured; None: nothing is read or written, and `path` is None.
    `version` is that of the format. `folder` names a folder in the cache folder. `lost`
    is a sentence for warnings: what an unusable file entails.
    """

    def __init__(
        self, folder: str, version: int, key: dict[str, Any] | None, lost: str
    ) -> None:
        self._head = {"version": version, "key": key}
        self._lost = lost
        self.path: Path | None = None
        caches = cache_folder()
        if key is not None and caches is not None:
            text = json.dumps(key, sort_keys=True).encode()
            name = f"{hashlib.sha256(text).hexdigest()[:32]}.json"
            self.path = caches / folder / name

    def read(self, parse: Callable[[Any], T]) -> T | None:
        """Return the parsed content; None: no file, or an unusable one (warns)."""
        if self.path is None:
            return None
        try:
            if not self.path.exists():
                return None
            content = load_json(self.path)
            if {name: content[name] for name in self._head} != self._head:
                raise ValueError("it is for another version, machine or model")
            return parse(content)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self._warn(f"{self.path} cannot be used ({error}). {self._lost}")
            return None

    def write(self, fields: dict[str, Any]) -> None:
        """Write the file atomically; if that fails, warn and write no more."""
        if self.path is None:
            return
        try:
            write_json(self.path, {**self._head, **fields})
        except OSError as error:
            self._warn(
                f"{self.path} cannot be written ({error}). {self._lost} "
                "Set MLX_SPECULATION_CACHE to another folder."
            )
            self.path = None

    def _warn(self, message: str) -> None:
        warnings.warn(message, CostFileWarning, stacklevel=4)

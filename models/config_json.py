"""Reading of config.json with all its keys; mlx-lm drops those it does not know."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlx_speculation.errors import ModelFolderError
from mlx_speculation.json_files import LARGEST, JsonFlawError, load_json


def read_config(folder: Path) -> dict[str, Any]:
    """Return the object in a folder's config.json, or raise `ModelFolderError`."""
    return read_json(folder / "config.json")


def read_json(
    file: Path,
    *,
    most: int = LARGEST,  # the largest size in bytes
    # Whether to refuse duplicate keys; mlx-lm takes the last one
    unique_keys: bool = False,
    advice: str = "Download it again, or correct it.",  # the end of errors
) -> dict[str, Any]:
    """Return the object in a JSON file of a model, or raise `ModelFolderError`."""
    try:
        value = load_json(file, most=most, unique_keys=unique_keys)
    except JsonFlawError as error:
        raise ModelFolderError(
            f"{str(file)!r} cannot be read: it {error}. {advice}"
        ) from error
    if not isinstance(value, dict):
        raise ModelFolderError(
            f"{str(file)!r} holds a {type(value).__name__}, and an object is needed. "
            f"{advice}"
        )
    return value


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the `text_config` of a config, or the whole config if it has none."""
    part = config.get("text_config")
    return part if isinstance(part, dict) else config


# Keys of objects that can be nested in a draft's config.json.
PARTS = ("transformer_layer_config", "text_config", "dflash_config", "eagle_config")


def parts_of(
    config: Mapping[str, Any], path: str = ""
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (path, part) for a config and its nested parts; a path is "" or "a.b."."""
    yield path, config
    for key in PARTS:
        part = config.get(key)
        if isinstance(part, dict):
            yield from parts_of(part, f"{path}{key}.")


def nested(config: dict[str, Any], *keys: str) -> Any:
    """Return the value at a path of keys; None: there is no such key."""
    value: Any = config
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value

"""Every part of mlx-lm that caches/, models/ and samplers/ rely on beyond its API.

`mlx_lm_touches.toml`, beside this file, is the list, with the SHA-256 of each source
text. Replay trusts a mixer only while its source is the one that was read.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Touch:
    """One object of mlx-lm."""

    module: str  # where it is defined
    name: str  # its name there, with dots inside classes
    used_by: str  # the file here that relies on it
    reason: str  # what has to stay true
    sha256: str  # the digest of its source text, without decorators


def _read() -> tuple[str, tuple[Touch, ...]]:
    """Return the version of mlx-lm that was read, and what is relied on."""
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)  # refuses a name that stands in it twice
    version = table.pop("mlx_lm_version")
    return version, tuple(
        Touch(module, name, **fields)
        for module, names in table.items()
        for name, fields in names.items()
    )


MLX_LM_VERSION, TOUCHES = _read()

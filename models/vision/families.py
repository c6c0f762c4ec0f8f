"""Families of mlx-vlm: supported ones, and reasons why others are refused.

`families.toml` lists every family that has a vision part. A family is supported if
tests/engine/test_vision_families.py compares its text with mlx-vlm's, with images and
without. A family that is not listed is refused.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.nn as nn

from mlx_speculation.errors import UnsupportedModelError

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
MLX_VLM_VERSION: str = _TABLES["mlx_vlm_version"]
REFUSED: dict[str, str] = _TABLES["refused"]
CACHES: dict[str, str] = _TABLES["caches"]


@dataclass(frozen=True, slots=True)
class Family:
    """A supported family.

    Attributes:
        name: the family's package under mlx_vlm.models.
        mrope: whether positions have three axes, and every call has to pass them, since
            images shift them.
        axes_last: whether positions are [1, n, 3] instead of [3, 1, n].
        recurrent: whether some layers are recurrent, see `recurrent_slots`.
        one_pass: whether a config can let tokens of an image see later tokens of the
            same image. If it does, one forward has to hold all images of a prompt.
        quantizes: whether its attention was tested with quantized caches; False for
            families with sliding layers, whose windows mlx-lm cannot quantize.
        one_image: whether mlx-vlm reads at most one image in a prompt.
        slots: how a prompt marks the positions of an image. "ids": with a placeholder
            token at each; for the others see `engine_ids`.
        placeholder: the placeholder token's id, or its key in config.json; None:
            `image_token_id` or `image_token_index`.
        text: the module of mlx_lm.models whose layers the family's MTP heads have;
            None: no MTP head is known.
    """

    name: str
    mrope: bool = False
    axes_last: bool = False
    recurrent: bool = False
    one_pass: bool = False
    quantizes: bool = False
    one_image: bool = False
    slots: Literal["ids", "spread", "beyond", "bounds"] = "ids"
    placeholder: str | int | None = None
    text: str | None = None


SERVED = {name: Family(name, **facts) for name, facts in _TABLES["served"].items()}


def check_family(name: Any) -> Family:
    """Return a family by its name, or raise `UnsupportedModelError`."""
    if name in SERVED:
        return SERVED[name]
    if name in REFUSED:
        why = REFUSED[name]
    else:
        why = f"mlx-vlm {MLX_VLM_VERSION} has no vision model of that name"
    raise UnsupportedModelError(
        f"Images cannot be read with {name!r}: {why}. Take one of the {len(SERVED)} "
        "families that docs/vision.md lists."
    )


def family_of(vlm: nn.Module) -> Family:
    """Return the family of a model of mlx-vlm.

    Raises:
        UnsupportedModelError: the model is not one of mlx-vlm, or its family or a
            setting of its config is not supported.
    """
    package, _, rest = type(vlm).__module__.partition(".models.")
    if package != "mlx_vlm":
        raise UnsupportedModelError(
            f"{type(vlm).__module__}.{type(vlm).__name__} is no model of mlx-vlm. Load "
            "one with mlx_vlm.load(path)."
        )
    family = check_family(rest.partition(".")[0])
    text = getattr(vlm.config, "text_config", None)
    seen = getattr(text, "use_bidirectional_attention", None)
    if seen and not (family.one_pass and seen == "vision"):
        raise UnsupportedModelError(
            f"The config of this {family.name} has use_bidirectional_attention "
            f"{seen!r}: tokens of a prompt see later ones, but prompts are read in "
            "chunks here. Take a causal variant."
        )
    return family

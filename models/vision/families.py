"""Families of mlx-vlm: those that are decoded here, and reasons why others are not.

`families.toml` beside this file names every one with a vision part. One is decoded when
its text was compared with mlx-vlm's own, with images and without, under drafts
(tests/engine/test_vision_families.py). What is in no table is refused.
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
    """A family that is decoded.

    Attributes:
        name: its package under mlx_vlm.models.
        mrope: whether positions have three axes, which images advance otherwise than
            text, and have to be passed in every call.
        axes_last: whether its positions are [1, n, 3], and not [3, 1, n].
        recurrent: whether some layers keep states, see `recurrent_slots`.
        one_pass: whether its config may let tokens of an image see later ones of it,
            which needs a prompt's images in one forward.
        quantizes: whether its attention was tried with quantized caches. mlx-lm cannot
            quantize windows, so families with sliding layers do not.
        one_image: whether mlx-vlm reads one image in a prompt, and no more.
        slots: where the slots of images are: "ids" has one placeholder for each; for
            the others see `engine_ids`.
        placeholder: what config.json calls the token that stands for a slot, or its id;
            None: `image_token_id` or `image_token_index`.
        text: the module of mlx_lm.models whose layers its MTP heads are made of; None:
            no head is known.
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
    """Return what is known of a family.

    Raises:
        UnsupportedModelError: it is not decoded here.
    """
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
        UnsupportedModelError: it is not mlx-vlm's, or of a family that is not decoded
            here, or a setting of its config is not.
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
            f"{seen!r}: tokens of a prompt see later ones, and prompts are read in "
            "chunks here. Take a causal variant."
        )
    return family

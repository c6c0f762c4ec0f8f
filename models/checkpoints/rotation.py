"""Rotary embeddings of draft layers, read from any known spelling in config.json.

    rope_theta                          for all layers
    rope_scaling {...}                  for all layers
    rope_parameters {...}               for all layers, `rope_theta` included
    rope_parameters {kind: {...}}       for the layers of one kind
    partial_rotary_factor               for all layers

The keys are at the top, in the part with the sizes of the layers, or in both. Several
values of a key have to be equal; null counts as missing. Values for all layers apply to
the kinds without an entry of their own. They must not contradict an entry of full
attention: files of Gemma give the theta of full attention in both ways.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.models.rope_utils import initialize_rope

from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models.config_json import parts_of

FULL, SLIDING = "full_attention", "sliding_attention"
_OBJECTS = ("rope_scaling", "rope_parameters")
_FLAT = ("rope_theta", "partial_rotary_factor")
_USUAL_THETA = 10_000.0
# Types, each with the type that rotates text in the same way. The axes of an mrope have
# equal positions in text.
_SAME_TYPES = {"mrope": "default", "deepseek_yarn": "yarn"}
_SCALES = {
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
}
# Numbers that are allowed to be 0 or negative
_FINITE = {"mscale", "mscale_all_dim", "attention_factor"}
# Values by their keys, each with its place in config.json
_Stated = dict[str, tuple[Any, str]]


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotation of queries and keys of a layer."""

    theta: float = _USUAL_THETA
    rope_type: str = "default"
    # The share of a head's dimensions that is rotated; None: config.json does not say
    factor: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # of the type

    @property
    def scaling(self) -> dict[str, Any] | None:
        """The options of mlx-lm's `initialize_rope`; None: nothing is scaled."""
        if self.rope_type == "default":
            return None
        share = {} if self.factor is None else {"partial_rotary_factor": self.factor}
        return {"rope_type": self.rope_type, **share, **self.options}

    @property
    def parameters(self) -> dict[str, Any]:
        """An entry of `rope_parameters`, as mlx-lm's Gemma 4 takes it."""
        scaling = self.scaling or {"rope_type": self.rope_type}
        return {**scaling, "rope_theta": self.theta}


def read_rotation(
    config: Mapping[str, Any],
    name: str,  # the drafter's name, for messages
    kind: str = FULL,
    *,
    # Defaults, unless config.json states more than `_FLAT` keys for these layers. With
    # the defaults, sliding layers ignore `_FLAT` keys that are stated for all layers
    usual: Rotation | None = None,
) -> Rotation:
    """Return the rotation of the layers of a kind.

    Raises:
        ModelFolderError: a value has a wrong type, two values contradict each other, or
            the entry of these layers or its rope_type is missing.
    """
    flat: _Stated = {}
    by_kind: dict[str, _Stated] = {}
    for place, key, value in _statements(config, name):
        if not isinstance(value, dict):
            _add(flat, key, value, place, name)
            continue
        entries = by_kind.setdefault(key, {})
        for option, each in value.items():
            _add(entries, option, each, f"{place}.{option}", name)
    if by_kind and kind not in by_kind and "rope_theta" not in flat:
        raise ModelFolderError(
            f"config.json of the {name} has rope_parameters for "
            f"{', '.join(sorted(by_kind))}, but no entry for its layers of {kind}. "
            "Add that entry."
        )
    if FULL in by_kind:
        for key, (value, place) in flat.items():
            _add(by_kind[FULL], key, value, place, name)
    stated = by_kind.get(kind, flat)
    values, base = {key: value for key, (value, _) in stated.items()}, Rotation()
    if usual is not None and values.keys() <= set(_FLAT):
        base, values = usual, values if kind == FULL or kind in by_kind else {}
    theta = values.pop("rope_theta", base.theta)
    share = values.pop("partial_rotary_factor", base.factor)
    scaled = values.pop("rope_type", None)
    options = values.keys() & (_SCALES | {"short_factor", "long_factor"})
    if scaled is None and options:
        raise ModelFolderError(
            f"config.json of the {name} has the rotation options "
            f"{', '.join(sorted(options))}, but no rope_type. Add it."
        )
    return Rotation(float(theta), scaled or base.rope_type, share, values)


def rotations_of(
    config: Mapping[str, Any], name: str, windows: Sequence[int | None]
) -> tuple[Rotation, ...]:
    """Return `read_rotation` of each layer; layers with a window are sliding ones."""
    kinds = [FULL if window is None else SLIDING for window in windows]
    by_kind = {kind: read_rotation(config, name, kind) for kind in sorted(set(kinds))}
    return tuple(by_kind[kind] for kind in kinds)


def check_rotation(
    rotation: Rotation, name: str, *, dims: int, positions: int | None
) -> None:
    """Raise `ModelFolderError` if mlx-lm cannot make the rotation for these sizes."""
    try:
        initialize_rope(dims, rotation.theta, False, rotation.scaling, positions)
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise ModelFolderError(
            f"config.json of the {name} has rope_scaling {rotation.scaling}, which is "
            f"not understood: {error!r}."
        ) from error


def _statements(config: Mapping[str, Any], name: str) -> Iterator[tuple[str, str, Any]]:
    """Yield place, key and value; if the value is an object, the key is a layer kind.

    The entries of that object are the options of these layers.
    """
    for path, part in parts_of(config):
        for key in _FLAT:
            # Beside Gemma's global_<key>, <key> is for sliding layers, not for all.
            if key in part and f"global_{key}" not in part:
                yield f"{path}{key}", key, part[key]
        for key in _OBJECTS:
            inner = part.get(key)
            if not isinstance(inner, dict | None):
                raise _refused(name, f"{path}{key}", inner, "an object or null")
            for option, value in (inner or {}).items():
                yield f"{path}{key}.{option}", option, value


def _add(into: _Stated, key: str, value: Any, place: str, name: str) -> None:
    """Check a value and add it, or refuse one that contradicts another."""
    if value is None or key.startswith("mrope"):
        return
    key = "rope_type" if key == "type" else key
    if key == "rope_type":
        if not isinstance(value, str):
            raise _refused(name, place, value, "a string")
        value = _SAME_TYPES.get(value, value)
    elif key in _SCALES | _FINITE | set(_FLAT):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not abs(value) <= sys.float_info.max:
            raise _refused(name, place, value, "a finite number")
        if value <= 0 and key not in _FINITE:
            raise _refused(name, place, value, "a finite number above 0")
        if key == "partial_rotary_factor" and value > 1:
            raise _refused(name, place, value, "a number up to 1")
    before, other = into.setdefault(key, (value, place))
    if before != value:
        raise ModelFolderError(
            f"config.json of the {name} has {key} {before!r} in {other} and "
            f"{value!r} in {place}, which contradict each other. Take out the one that "
            "is wrong."
        )


def _refused(name: str, place: str, value: Any, wanted: str) -> ModelFolderError:
    return ModelFolderError(
        f"config.json of the {name} has {place} {value!r}, which has to be {wanted}. "
        "Correct it, or take another checkpoint."
    )

"""Rotary embeddings of draft layers, read from any known spelling in config.json.

    rope_theta                          for all layers
    rope_scaling {...}                  for all layers
    rope_parameters {...}               for all layers, `rope_theta` included
    rope_parameters {kind: {...}}       for the layers of one kind
    partial_rotary_factor               for all layers

The keys are at the top, in the part with the sizes of the layers, or in both. A key may
occur several times with equal values; null counts as missing. If there are values for
all layers and for single kinds, the former must not contradict those of full attention:
files of Gemma repeat the theta of full attention in this way.
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
# Types, and the type that rotates text in the same way: for text, all parts of an mrope
# have the same position.
_SAME_TYPES = {"mrope": "default", "deepseek_yarn": "yarn"}
_POSITIVE = frozenset(
    {
        "rope_theta",
        "partial_rotary_factor",
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
        "beta_fast",
        "beta_slow",
    }
)
_FINITE = frozenset({"mscale", "mscale_all_dim", "attention_factor"})
# Options that need a `rope_type`.
_SCALES = _POSITIVE - set(_FLAT) | {"short_factor", "long_factor"}


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotation of queries and keys of a layer."""

    theta: float = _USUAL_THETA
    rope_type: str = "default"
    # The share of a head's dimensions that is rotated; None: config.json does not say
    factor: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # options of the type

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


@dataclass(frozen=True, slots=True)
class _Stated:
    value: Any
    place: str


_Statements = dict[str, _Stated]


def read_rotation(
    config: Mapping[str, Any],  # the content of config.json
    name: str,  # the drafter's name, for messages
    kind: str = FULL,  # the kind of layers
    *,
    usual: Rotation | None = None,  # for configs with no other key than `_FLAT`
) -> Rotation:
    """Return the rotation of the layers of a kind.

    Raises:
        ModelFolderError: a value has a wrong type, two values contradict each other, or
            there are entries for other kinds of layers only.
    """
    flat, by_kind = _statements(config, name)
    if by_kind and kind not in by_kind and "rope_theta" not in flat:
        raise ModelFolderError(
            f"config.json of the {name} has rope_parameters for "
            f"{', '.join(sorted(by_kind))}, and it has layers of {kind}. Add an entry "
            "for them."
        )
    compared = kind if kind == FULL or FULL not in by_kind else FULL
    merged = dict(by_kind.get(compared, {}))
    for key, stated in flat.items():
        _state(merged, key, stated, name)
    if compared != kind:
        merged = by_kind.get(kind, flat)
    null = merged.get("rope_theta")
    if null is not None and null.value is None:
        raise _refused(name, null.place, None, "a finite number above 0")
    values = {key: each.value for key, each in merged.items() if each.value is not None}
    return _rotation(values, kind, name, usual)


def _rotation(
    values: dict[str, Any], kind: str, name: str, usual: Rotation | None
) -> Rotation:
    base = Rotation()
    if usual is not None and values.keys() <= set(_FLAT):
        base, values = usual, values if kind == FULL else {}
    theta = values.pop("rope_theta", base.theta)
    share = values.pop("partial_rotary_factor", base.factor)
    scaled = values.pop("rope_type", None)
    if scaled is None and (options := values.keys() & _SCALES):
        raise ModelFolderError(
            f"config.json of the {name} has {', '.join(sorted(options))} of a rotation "
            "and no rope_type. Name the type."
        )
    return Rotation(float(theta), scaled or base.rope_type, share, values)


def rotations_of(
    config: Mapping[str, Any], name: str, windows: Sequence[int | None]
) -> tuple[Rotation, ...]:
    """Return the rotation of each layer; layers with a window are sliding ones.

    Raises:
        ModelFolderError: see `read_rotation`.
    """
    kinds = [FULL if window is None else SLIDING for window in windows]
    by_kind = {kind: read_rotation(config, name, kind) for kind in sorted(set(kinds))}
    return tuple(by_kind[kind] for kind in kinds)


def check_rotation(
    rotation: Rotation, name: str, *, dims: int, positions: int | None
) -> None:
    """Refuse a rotation that mlx-lm cannot make for heads of `dims` numbers.

    Raises:
        ModelFolderError: its type is unknown, or an option is missing.
    """
    try:
        initialize_rope(dims, rotation.theta, False, rotation.scaling, positions)
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise ModelFolderError(
            f"config.json of the {name} has rope_scaling {rotation.scaling}, which is "
            f"not understood: {error!r}."
        ) from error


def _statements(
    config: Mapping[str, Any], name: str
) -> tuple[_Statements, dict[str, _Statements]]:
    """Return the statements for all layers, and those for each kind of layers."""
    flat: _Statements = {}
    by_kind: dict[str, _Statements] = {}
    for path, key, value in _stated(config, name):
        place = f"{path}{key}"
        if not isinstance(value, dict):
            _state(flat, key, _Stated(value, place), name)
            continue
        entries = by_kind.setdefault(key, {})
        for option, each in value.items():
            _state(entries, option, _Stated(each, f"{place}.{option}"), name)
    return flat, by_kind


def _stated(config: Mapping[str, Any], name: str) -> Iterator[tuple[str, str, Any]]:
    """Yield path, key and value; if the value is an object, key is a kind of layers."""
    for path, part in parts_of(config):
        for key in _FLAT:
            # With Gemma's global_<key> for full layers, <key> is for sliding ones.
            if key in part and f"global_{key}" not in part:
                yield path, key, part[key]
        for key in _OBJECTS:
            inner = part.get(key)
            if not isinstance(inner, dict | None):
                raise _refused(name, f"{path}{key}", inner, "an object or null")
            for option, value in (inner or {}).items():
                yield f"{path}{key}.", option, value


def _state(into: _Statements, key: str, stated: _Stated, name: str) -> None:
    """Check a statement and add it, or refuse one that contradicts another.

    Null is kept only until there is another value.
    """
    key = "rope_type" if key == "type" else key
    if key.startswith("mrope"):
        return
    stated = _checked(key, stated, name)
    before = into.get(key)
    if before is None or before.value is None:
        into[key] = stated
    elif stated.value is not None and stated.value != before.value:
        raise ModelFolderError(
            f"config.json of the {name} says {key} {before.value!r} in {before.place} "
            f"and {stated.value!r} in {stated.place}, which contradict each other. "
            "Take out the one that is wrong."
        )


def _checked(key: str, stated: _Stated, name: str) -> _Stated:
    value, place = stated.value, stated.place
    if value is None:
        return stated
    if key == "rope_type":
        if not isinstance(value, str):
            raise _refused(name, place, value, "a string")
        return _Stated(_SAME_TYPES.get(value, value), place)
    if key in _POSITIVE | _FINITE:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not abs(value) <= sys.float_info.max:
            raise _refused(name, place, value, "a finite number")
        if key in _POSITIVE and value <= 0:
            raise _refused(name, place, value, "a finite number above 0")
        if key == "partial_rotary_factor" and value > 1:
            raise _refused(name, place, value, "a number up to 1")
    return stated


def _refused(name: str, place: str, value: Any, wanted: str) -> ModelFolderError:
    return ModelFolderError(
        f"config.json of the {name} says {place} {value!r}, and {wanted} is needed. "
        "Take a whole checkpoint, or correct it."
    )

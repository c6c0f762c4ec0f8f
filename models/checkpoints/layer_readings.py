"""Layers of a target that a draft reads: listed by config.json, or probed.

A list in config.json, at its top or in a nested part, counts in one of two ways:

    layers   i is the output of layer i. Usual in `target_layer_ids` and eagle_config
    tuple    0 is the embedding, i the output of layer i - 1. Usual in the other keys

This module returns layers counted from 0; -1 stands for the embedding. Without a list,
the candidates for a probe are the layers that drafts of this or another kind usually
read.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from mlx_speculation.errors import InvalidRequestError, ModelFolderError
from mlx_speculation.models.checkpoints.draft_checkpoint import Config, whole_numbers
from mlx_speculation.models.checkpoints.joined_head import check_layers
from mlx_speculation.models.checkpoints.probe import Score
from mlx_speculation.models.config_json import parts_of

LayerIds = Literal["layers", "tuple"]
Layers = tuple[int, ...]
_KEYS: Mapping[str, LayerIds] = {
    "target_layer_ids": "layers",
    "eagle_aux_hidden_state_layer_ids": "tuple",
    "aux_hidden_state_layer_ids": "tuple",
}
_COUNTS = {"layers": "layers from 0", "tuple": "the embedding as 0"}


@dataclass(frozen=True, slots=True)
class LayerList:
    """A list of layers in config.json."""

    ids: tuple[int, ...]
    counts: LayerIds  # the usual way of counting for its key
    place: str  # its key in config.json, with the path

    def layers(self, counts: LayerIds | None = None) -> Layers:
        """Return the layers, counted from 0.

        `counts` says how the list counts; None: as `self.counts` says.
        """
        shift = 1 if (counts or self.counts) == "tuple" else 0
        return tuple(each - shift for each in self.ids)


@dataclass(frozen=True, slots=True)
class LayerReadings:
    """Candidates for the list of layers that a draft was trained on."""

    # Each with its name in messages; the first is the usual one
    layers: Mapping[Layers, str]
    name: str  # of the draft
    stated: LayerList | None = None  # the list in config.json
    guessed: bool = False  # whether config.json has no list

    @property
    def usual(self) -> Layers:
        """The layers to read without a probe."""
        return next(iter(self.layers))

    @property
    def tapped(self) -> list[int]:
        """Every layer that a probe reads."""
        return sorted({index for each in self.layers for index in each})

    def notice(self, taken: Layers, score: Score | None) -> str:
        """Return a notice to the user about the chosen layers; "": none is needed.

        `score` is the draft's score on these layers; None: there was no probe.
        """
        probed = "not probed" if score is None else f"the draft {score}"
        if self.guessed:
            usual = "the usual ones" if taken == self.usual else "found by a probe"
            return (
                f"config.json of the {self.name} lists no layers of its target. Layers "
                f"{list(taken)} are read, {usual} ({probed}). Add target_layer_ids if "
                f"the {self.name} was trained on others."
            )
        stated = self.stated
        if stated is None or set(taken) == set(stated.layers()):
            return ""
        return (
            f"config.json of the {self.name} has {stated.place} {list(stated.ids)}, "
            f"but layers {list(taken)} are read ({probed}): the list does not count "
            f"{_COUNTS[stated.counts]}, although lists under that key usually do."
        )


def stated_list(config: Config, name: str) -> LayerList | None:
    """Return the list of layers in config.json; None: there is none.

    Raises:
        ModelFolderError: the value is no list of integers, or two lists contradict each
            other.
    """
    first: LayerList | None = None
    # Nested parts for one kind of draft come first.
    special = ("eagle_config.", "dflash_config.")
    parts = sorted(parts_of(config), key=lambda each: not each[0].endswith(special))
    for path, part in parts:
        for key, counts in _KEYS.items():
            if part.get(key) is None:
                continue
            if path.endswith("eagle_config."):
                counts = "layers"
            ids = tuple(whole_numbers(part[key], f"{path}{key}", name))
            each = LayerList(ids, counts, f"{path}{key}")
            first = first or each
            copied = first.place.rpartition(".")[2] == key and first.ids == ids
            if not copied and each.layers() != first.layers():
                raise _contradiction(first, each, name)
    return first


def _contradiction(one: LayerList, other: LayerList, name: str) -> ModelFolderError:
    said = " and ".join(
        f"{each.place} {list(each.ids)}, which counts {_COUNTS[each.counts]}"
        for each in (one, other)
    )
    return ModelFolderError(
        f"config.json of the {name} has {said}: these are not the same layers. "
        "Take out the list that is wrong."
    )


def read_layers(
    config: Config,
    name: str,  # of the draft, for messages
    *,
    trunk: int,  # how many layers the target has
    features: Sequence[int],  # possible counts of layers `fc` reads; empty: unknown
    # Called with (trunk, number of layers); returns lists, the usual one first
    usual: Callable[[int, int], Iterable[Sequence[int]]],
    usual_count: int = 0,  # the usual number of layers, if `features` allows it
    counts: LayerIds | None = None,  # how the list counts; None: as usual for its key
    both: bool = True,  # whether to try the other way of counting too
    arranged: Callable[[Layers], Layers] = tuple,  # orders layers as the draft does
    advice: str = "",  # see `check_layers`
) -> LayerReadings:
    """Return the readings of config.json: candidates for the layers of a draft.

    Raises:
        ModelFolderError: the target lacks a listed layer; or there is no list, and
            there are no usual layers for the count that `fc` reads.
        InvalidRequestError: `counts` is no way of counting.
    """
    check_counts(counts)
    stated = stated_list(config, name)
    if stated is None:
        if not features or usual_count in features:
            features = [usual_count]
        return _guessed(name, trunk, features, usual)
    if counts is not None:
        stated, both = replace(stated, counts=counts), False
    elif stated.counts == "layers" and max(stated.ids) == trunk:
        both = True  # counted from 0, this list has a layer that the target lacks
    wanted: list[LayerIds] = [stated.counts]
    if both:
        wanted.append("layers" if stated.counts == "tuple" else "tuple")
    lists = [arranged(stated.layers(each)) for each in wanted]
    readings = {
        layers: f"{each!r} {list(layers)}"
        for layers, each in zip(lists, wanted, strict=True)
        if min(layers) >= -1 and max(layers) < trunk
    }
    usual_one = lists[0] if min(lists[0]) < -1 else next(iter(readings), lists[0])
    check_layers(
        usual_one, name, trunk=trunk, features=features, lowest=-1, advice=advice
    )
    return LayerReadings(readings, name, stated)


def check_counts(counts: LayerIds | None) -> None:
    """Raise `InvalidRequestError` unless `counts` is None or one of `LayerIds`."""
    if counts not in (None, *get_args(LayerIds)):
        raise InvalidRequestError(
            f"layer_ids is {counts!r}, but has to be one of "
            f"{', '.join(get_args(LayerIds))}."
        )


def _guessed(
    name: str,
    trunk: int,
    features: Sequence[int],
    usual: Callable[[int, int], Iterable[Sequence[int]]],
) -> LayerReadings:
    count = features[0] if len(features) == 1 else 0
    if not 1 < count <= trunk:
        many = " or ".join(map(str, features))
        raise ModelFolderError(
            f"config.json of the {name} has no target_layer_ids, and there is no usual "
            f"choice for a projection that takes {many} of the target's {trunk} "
            "layers. Add target_layer_ids."
        )
    lists = [tuple(each) for each in usual(trunk, count)]
    lists.append(_spread(0, trunk - 1, count))
    readings = {
        each: f"guessed {list(each)}"
        for each in lists
        if len(set(each)) == len(each) == count and 0 <= min(each) <= max(each) < trunk
    }
    return LayerReadings(readings, name, guessed=True)


def usual_of_blocks(trunk: int, count: int) -> list[Layers]:
    """Return lists for block drafters; the first one is spread from 1 to trunk - 3."""
    return [_spread(1, trunk - 3, count), *_three(trunk)]


def usual_of_eagle(trunk: int, count: int) -> list[Layers]:
    """Return lists for EAGLE-3 heads: two lists of 3 layers, then one of `count`."""
    return [*_three(trunk), _spread(1, trunk - 3, count)]


def _three(trunk: int) -> list[Layers]:
    """Return the layers of [2, trunk // 2, trunk - 3], read as "tuple" and "layers"."""
    numbers = (2, trunk // 2, trunk - 3)
    return [tuple(each - 1 for each in numbers), numbers]


def _spread(first: int, last: int, count: int) -> Layers:
    return tuple(round(first + i * (last - first) / (count - 1)) for i in range(count))

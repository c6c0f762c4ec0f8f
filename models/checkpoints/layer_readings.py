"""Layers of a target that a draft reads: listed by config.json, or guessed.

A list counts in one of two ways:

    layers   i is the output of layer i: `target_layer_ids`, and inside of eagle_config
    tuple    0 is the embedding, i the output of layer i - 1: the other keys

It may stand at the top of config.json or in a nested part. In what is returned, layers
are counted from 0, and -1 stands for the embedding.

Where no list stands, the layers are guessed: the usual ones of the kind of draft, or
others that are in use. Published drafts were trained on layers that no formula gives,
so a probe also looks around them, see `search`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from mlx_speculation.errors import InvalidRequestError, ModelFolderError
from mlx_speculation.models.checkpoints.draft_checkpoint import Config, whole_numbers
from mlx_speculation.models.checkpoints.joined_head import check_layers
from mlx_speculation.models.checkpoints.probe import Score, Trials, ranked
from mlx_speculation.models.config_json import parts_of

LayerIds = Literal["layers", "tuple"]
Layers = tuple[int, ...]
_KEYS: Mapping[str, LayerIds] = {
    "target_layer_ids": "layers",
    "eagle_aux_hidden_state_layer_ids": "tuple",
    "aux_hidden_state_layer_ids": "tuple",
}
_COUNTS = {"layers": "layers from 0", "tuple": "the embedding too"}
_SWEEPS = 3
# Layers of a stretch that are tried at first; others only beside the best of them.
_TRIED = 8


@dataclass(frozen=True, slots=True)
class LayerList:
    """A list of layers in config.json."""

    ids: tuple[int, ...]
    counts: LayerIds  # by its place
    place: str

    def layers(self, counts: LayerIds | None = None) -> Layers:
        """Return the layers, from 0; counted as its place says when omitted."""
        shift = 1 if (counts or self.counts) == "tuple" else 0
        return tuple(each - shift for each in self.ids)


@dataclass(frozen=True, slots=True)
class LayerReadings:
    """Layers that a draft may have been trained on."""

    # Each with what messages call it; the usual ones first
    layers: Mapping[Layers, str]
    name: str  # of the draft
    stated: LayerList | None = None
    guessed: bool = False  # whether config.json says nothing of them

    @property
    def usual(self) -> Layers:
        """The layers to read where nothing is probed."""
        return next(iter(self.layers))

    def tapped(self, trunk: int) -> list[int]:
        """Return every layer that a probe may read, of a target with so many."""
        named = {index for each in self.layers for index in each}
        return sorted(named | set(range(trunk)) if self.guessed else named)

    def notice(self, taken: Layers, score: Score | None) -> str:
        """Return what is to be said of layers that were taken; "": nothing.

        Args:
            taken: the layers.
            score: of the draft on them; None: it was not probed.
        """
        probed = "not probed" if score is None else f"it {score}"
        if self.guessed:
            usual = "the usual ones" if taken == self.usual else "found by a probe"
            return (
                f"config.json of the {self.name} lists no layers of its target. It "
                f"reads {list(taken)}, {usual} ({probed}). Add target_layer_ids if it "
                "was trained on others."
            )
        stated = self.stated
        if stated is None or set(taken) == set(stated.layers()):
            return ""
        return (
            f"config.json of the {self.name} has {stated.place} {list(stated.ids)}. It "
            f"reads layers {list(taken)} ({probed}): the list does not count "
            f"{_COUNTS[stated.counts]}, as is usual there."
        )


def stated_list(config: Config, name: str) -> LayerList | None:
    """Return the list of layers in config.json; None: there is none.

    Raises:
        ModelFolderError: it is no list of whole numbers, or two do not agree.
    """
    first: LayerList | None = None
    # The part of a kind of draft comes first.
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
        f"config.json of the {name} says {said}: they do not name the same layers. "
        "Take out the list that is wrong."
    )


def read_layers(
    config: Config,  # what config.json holds
    name: str,  # of the draft, for messages
    *,
    trunk: int,  # how many layers the target has
    features: Sequence[int],  # how many `fc` may take; none: not known
    # Makes the usual lists of so many layers, the most usual first
    usual: Callable[[int, int], Iterable[Sequence[int]]],
    usual_count: int = 0,  # how many are usual, where `features` leaves it open
    counts: LayerIds | None = None,  # what the list counts; by its place when omitted
    both: bool = True,  # whether it may count in the other way than its place says
    arranged: Callable[[Layers], Layers] = tuple,  # orders layers as the draft does
    advice: str = "",  # what may help where the target lacks one, after a comma
) -> LayerReadings:
    """Return the layers that config.json may mean.

    Raises:
        ModelFolderError: the target has no such layers, or there are no usual ones.
        InvalidRequestError: `counts` is neither.
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
        both = True  # such a list cannot count from 0
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
    """Refuse what is no way of counting layers.

    Raises:
        InvalidRequestError: it is none.
    """
    if counts not in (None, *get_args(LayerIds)):
        raise InvalidRequestError(
            f"layer_ids is {counts!r}, and one of {', '.join(get_args(LayerIds))} is "
            "needed."
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
            f"config.json of the {name} names no target_layer_ids, and its projection "
            f"takes {many} of the target's {trunk} layers, for which there are no "
            "usual ones. Name them."
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
    """Return the usual layers of drafters of blocks: from the second to a late one."""
    return [_spread(1, trunk - 3, count), *_three(trunk)]


def usual_of_eagle(trunk: int, count: int) -> list[Layers]:
    """Return the usual layers of EAGLE-3 heads: an early, a middle and a late one."""
    return [*_three(trunk), _spread(1, trunk - 3, count)]


def _three(trunk: int) -> list[Layers]:
    """Return (2, N // 2, N - 3), which count the embedding too, and as layers from 0.

    Only the first counting is vLLM's, SGLang's and the authors'.
    """
    numbers = (2, trunk // 2, trunk - 3)
    return [tuple(each - 1 for each in numbers), numbers]


def _spread(first: int, last: int, count: int) -> Layers:
    return tuple(round(first + i * (last - first) / (count - 1)) for i in range(count))


def probed(
    score: Callable[[Layers], Score],
    readings: LayerReadings,
    trunk: int,
    advice: str,  # what a refusal ends with
) -> dict[Layers, Score]:
    """Return the score of layers, the best first.

    Args:
        score: scores a draft on some layers.
        readings: the layers that it may read; where they are guessed, others are tried.
        trunk: how many layers the target has.
        advice: what a refusal ends with.

    Raises:
        ConventionError: it is not above chance on any.
    """
    trials = Trials(score)
    others = [each for each in readings.layers if each != readings.usual]
    if readings.guessed:
        advice = "add target_layer_ids to its config.json"
        first = trials.best(readings.usual, others)
        others.append(search(trials.score, first, trunk))
    return ranked(
        trials.score,
        readings.usual,
        others,
        advice,
        lambda layers: readings.layers.get(layers, f"searched {list(layers)}"),
    )


def search(score: Callable[[Layers], Score], layers: Layers, trunk: int) -> Layers:
    """Return layers in rising order that score best, one of them moved at a time.

    The outputs of neighbouring layers are alike, so few are tried where there are many.

    Args:
        score: scores some layers.
        layers: to begin with, in rising order.
        trunk: how many layers the target has.
    """
    best = layers
    for _ in range(_SWEEPS):
        before = best
        for index in range(len(best)):
            low = best[index - 1] + 1 if index else 0
            high = best[index + 1] if index + 1 < len(best) else trunk
            best = _best_at(score, best, index, range(low, high))
        if best == before:
            break
    return best


def _best_at(
    score: Callable[[Layers], Score], layers: Layers, index: int, allowed: range
) -> Layers:
    """Return layers with the best one at an index."""

    def with_layer(layer: int) -> Layers:
        return (*layers[:index], layer, *layers[index + 1 :])

    def value(layer: int) -> Any:
        return score(with_layer(layer)).mean

    step = max(1, len(allowed) // _TRIED)
    best = max([layers[index], *allowed[::step]], key=value)
    while step > 1:
        step //= 2
        beside = [each for each in (best - step, best + step) if each in allowed]
        best = max([best, *beside], key=value)
    return with_layer(best)

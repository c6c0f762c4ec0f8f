"""Taps on calls whose input or output is a hidden state, and the states read there."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.errors import InvalidRequestError, UnsupportedModelError
from mlx_speculation.models.introspect.parts import Parts
from mlx_speculation.models.observer import Observer, first_array

Key = int | str
BEFORE, AFTER = "before_norm", "after_norm"


class Tap(NamedTuple):
    """A place at which a hidden state is read."""

    key: Key  # the state's name; i is the output of layer i, -1 the input of layer 0
    module: nn.Module  # the module whose input or output the state is
    entering: bool = False  # whether the state is the module's input, not its output
    calls: int = 1  # how often a forward calls the module; the last call is read


def tap_for(parts: Parts, key: Key) -> Tap:
    """Return the tap for a hidden state."""
    if isinstance(key, int):
        return Tap(key, parts.layers[max(key, 0)], entering=key < 0)
    if parts.norm is not None:
        return Tap(key, parts.norm, key == BEFORE, parts.norm_calls)
    if key == BEFORE:
        parts.require("layers")
        return Tap(key, parts.layers[-1])
    assert parts.trunk is not None
    return Tap(key, parts.trunk)


class States:
    """The hidden states of one forward or several, in order, joined by position."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self._keys = tuple(keys)
        self._forwards: list[dict[Key, mx.array]] = []

    @property
    def positions(self) -> int:
        """Number of positions that were fed."""
        return sum(next(iter(each.values())).shape[1] for each in self._forwards)

    @property
    def before_norm(self) -> mx.array:
        """Input of the final norm, [batch, positions, dim]."""
        return self._joined(BEFORE)

    @property
    def after_norm(self) -> mx.array:
        """Output of the final norm, [batch, positions, dim]."""
        return self._joined(AFTER)

    def layer(self, index: int) -> mx.array:
        """Return the output of a decoder layer, [batch, positions, dim].

        -1 is the input of the first layer.
        """
        return self._joined(index)

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays, to be evaluated."""
        return [array for each in self._forwards for array in each.values()]

    def add(self, forward: dict[Key, mx.array]) -> None:
        """Add the states of one forward."""
        self._forwards.append(forward)

    def cut(self, positions: int, rows: Sequence[int] | None = None) -> None:
        """Keep `rows` and the first `positions` of the last forward; None: all rows."""
        index = slice(None) if rows is None else mx.array([*rows])
        last = self._forwards[-1].items()
        self._forwards[-1] = {key: x[index, :positions] for key, x in last}

    def take(self, rows: Sequence[int]) -> None:
        """Keep these positions of the only forward, in this order."""
        (only,), index = self._forwards, mx.array([*rows])
        self._forwards = [{key: x[:, index] for key, x in only.items()}]

    def _joined(self, key: Key) -> mx.array:
        if key not in self._keys:
            raise InvalidRequestError(
                f"{key!r} is not collected, only {list(self._keys)}. Request it when "
                "the HiddenStates are made."
            )
        parts = [each[key] for each in self._forwards]
        if not parts:
            raise InvalidRequestError(
                "No forward of the model was seen. Call the model inside the block: "
                "with taps.collect() as states: model(ids, cache=caches)"
            )
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)


class Notes(Observer):
    """The states that taps read inside of one block of `HiddenStates.collect`."""

    def __init__(self, taps: Sequence[Tap]) -> None:
        self._taps = taps
        self._seen: dict[Key, list[mx.array]] = {tap.key: [] for tap in taps}
        self._where: dict[tuple[int, bool], list[Key]] = {}
        for tap in taps:
            self._where.setdefault((id(tap.module), tap.entering), []).append(tap.key)

    def enter(
        self, module: nn.Module, method: str, values: tuple[Any, ...]
    ) -> mx.array | None:
        """Read the states in the input of a module."""
        self._note(module, True, values)
        return None

    def leave(
        self, module: nn.Module, method: str, values: tuple[Any, ...], result: Any
    ) -> None:
        """Read the states in the output of a module."""
        self._note(module, False, result)

    def forwards(self) -> list[dict[Key, mx.array]]:
        """Return the states of each forward.

        Raises:
            UnsupportedModelError: some modules were called more often than others.
        """
        counts = {tap.key: len(self._seen[tap.key]) / tap.calls for tap in self._taps}
        if len(set(counts.values())) > 1 or any(n % 1 for n in counts.values()):
            raise UnsupportedModelError(
                f"The observed modules have seen {counts} forwards, but all should "
                "have seen the same whole number. Make the HiddenStates after the last "
                "change to the model's modules, and let forwards end inside the block."
            )
        lasts = [self._seen[tap.key][tap.calls - 1 :: tap.calls] for tap in self._taps]
        keys = [tap.key for tap in self._taps]
        return [
            dict(zip(keys, forward, strict=True))
            for forward in zip(*lasts, strict=True)
        ]

    def _note(self, module: nn.Module, entering: bool, values: Any) -> None:
        for key in self._where.get((id(module), entering), ()):
            # A new array object, since the model can write to the old one later.
            self._seen[key].append(first_array(values)[...])

"""Conversion of a prefix cache's segment to arrays and plain values, and back.

    arrays    `0.rows.3.1`     role 0, leaf 3: the second of its arrays of rows
              `0.states.5`     role 0: the sixth array of its states
              `0.hidden`       the target's hidden states that a head reads again
    plan      maps each role's mark to the role's index, the number of row arrays of
              each leaf, and the fields of the role's states; there `{"array": 5}`
              stands for `0.states.5`

`SegmentFolder` checks each file with a secret key, so a changed plan is never read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_speculation.caches.files.safetensors_reader import need
from mlx_speculation.caches.prefix.restore_points import Point
from mlx_speculation.caches.prefix.roles import Role
from mlx_speculation.caches.snapshots.snapshot import Rows, Snapshot

Arrays = dict[str, mx.array]


class Held(NamedTuple):
    """Rows and states of one role in a segment."""

    rows: Snapshot
    point: Point | None  # at the segment's end


def encoded(kept: Mapping[int, Held], marks: Sequence[str]) -> tuple[Arrays, Any]:
    """Return the arrays and the plan of a segment."""
    arrays: Arrays = {}
    plan: dict[str, Any] = {}
    for which, (rows, point) in kept.items():
        counts = []
        for number, leaf in enumerate(rows.leaves):
            parts = leaf.rows[0].arrays if leaf.rows else ()
            counts.append(len(parts))
            for place, array in enumerate(parts):
                arrays[f"{which}.rows.{number}.{place}"] = array
        states: list[mx.array] = []
        fields = None
        if point is not None:
            fields = [_plain(leaf.state, states) for leaf in point.states.leaves]
            if point.hidden is not None:
                arrays[f"{which}.hidden"] = point.hidden
        arrays |= {f"{which}.states.{i}": each for i, each in enumerate(states)}
        plan[marks[which]] = [which, counts, fields]
    return arrays, plan


def decoded(
    arrays: Arrays, plan: Any, roles: Sequence[Role], start: int, stop: int
) -> dict[int, Held]:
    """Return the rows and states of each known role for the tokens [start, stop).

    Raises:
        FlawError: the caches of this process have other layers or rows.
    """
    kept = {}
    for which, role in enumerate(roles):
        if role.mark in plan:
            name, counts, fields = plan[role.mark]
            need(
                len(counts) == len(role.empty.leaves),
                f"it has {len(counts)} layers, but this process has "
                f"{len(role.empty.leaves)}",
            )
            kept[which] = _held(arrays, role, str(name), counts, fields, start, stop)
    return kept


def _held(
    arrays: Arrays,
    role: Role,
    name: str,
    counts: Sequence[int],
    fields: Any,
    start: int,
    stop: int,
) -> Held:
    first, last = role.rows(start), role.rows(stop)
    leaves, states = [], []
    for number, leaf in enumerate(role.empty.leaves):
        parts = tuple(
            arrays[f"{name}.rows.{number}.{i}"] for i in range(counts[number])
        )
        need(
            all(x.shape[-2] == last - first for x in parts),
            f"its arrays do not have {last - first} rows",
        )
        rows = (Rows(first, last, parts),) if parts else ()
        leaves.append(replace(leaf, rows=rows, state=None))
        if fields is not None:
            state = _field(fields[number], arrays, f"{name}.states.")
            states.append(replace(leaf, rows=(), state=state))
    rows_of = Snapshot(first, last, tuple(leaves))
    if fields is None:
        return Held(rows_of, None)
    taken = Snapshot(stop, stop, tuple(states))
    return Held(rows_of, Point(stop, taken, arrays.get(f"{name}.hidden")))


def _plain(value: Any, arrays: list[mx.array]) -> Any:
    """Return a state's fields as plain values; append their arrays to `arrays`."""
    if isinstance(value, mx.array):
        arrays.append(value)
        return {"array": len(arrays) - 1}
    if isinstance(value, dict):
        return {"fields": {name: _plain(each, arrays) for name, each in value.items()}}
    if isinstance(value, list | tuple):
        kind = type(value).__name__
        return {kind: [_plain(each, arrays) for each in value]}
    need(
        value is None or isinstance(value, int | float | str),
        f"one of its fields is a {type(value).__name__}, which cannot be stored",
    )
    return value


def _field(plain: Any, arrays: Arrays, prefix: str) -> Any:
    """Return the value that `_plain` encoded."""
    if not isinstance(plain, dict):
        return plain
    ((kind, value),) = plain.items()
    if kind == "array":
        return arrays[f"{prefix}{value}"]
    if kind == "fields":
        return {name: _field(each, arrays, prefix) for name, each in value.items()}
    items = [_field(each, arrays, prefix) for each in value]
    return items if kind == "list" else tuple(items)

"""Contents of caches, as numbers that can be compared."""

from dataclasses import asdict
from typing import Any

import numpy as np

from mlx_speculation.caches import leaves
from mlx_speculation.engine import Statistics


def content(caches: list[Any]) -> list[Any]:
    """Return offsets, ring indices and every array that the next step may read."""
    result: list[Any] = []
    for place, leaf in leaves(caches):
        if hasattr(leaf, "cache"):
            arrays = leaf.cache
        else:
            arrays = () if leaf.keys is None else leaf.keys_and_values()
            result += [leaf.offset, getattr(leaf, "_idx", None)]
        result += [place, *(None if a is None else np.array(a) for a in arrays)]
    return result


def assert_same_content(before: list[Any], after: list[Any]) -> None:
    assert len(before) == len(after)
    for expected, got in zip(before, after, strict=True):
        if isinstance(expected, np.ndarray):
            np.testing.assert_array_equal(got, expected)
        else:
            assert got == expected


def counts(statistics: Statistics) -> dict[str, Any]:
    """Return the statistics that do not depend on times."""
    counted = asdict(statistics).items()
    return {k: v for k, v in counted if not k.endswith(("seconds", "paused"))}

"""Our own files of caches, version 1: what the header says, read and checked.

| metadata | |
|---|---|
| mlx_speculation | "caches" |
| version | the version of this layout, "1" |
| description | JSON: the caches, the rows of tokens, draft_seen, the user's metadata |
| digest | SHA-256 of the header without itself, and of the data |

The tensors are `tokens.ROW` and, named by `tree`, those of the caches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_speculation.caches.files import tree
from mlx_speculation.caches.files.fields import need
from mlx_speculation.caches.files.safetensors_reader import parse_json, shown
from mlx_speculation.caches.files.tree import Node, Rows

VERSION = "1"
MAX_TOKEN = 2**31 - 1  # ids are stored as int32


@dataclass(frozen=True, slots=True)
class Content:
    """A checked file; nothing is built yet."""

    target: tuple[Node, ...]
    drafter: tuple[Node, ...] | None
    rows: Rows | None
    draft_seen: tuple[int, ...] | None
    metadata: dict[str, str]
    layout: str


def check_digest(found: str, said: str | None) -> None:
    """Refuse a file that has changed since it was saved."""
    need(
        found == said,
        f"its content has the digest {found[:12]} and was saved with "
        f"{shown(said and said[:12])}: it has changed since",
    )


_DESCRIPTION = {"rows", "draft_seen", "metadata", "caches", "draft_caches"}


def read_own(metadata: dict[str, str], arrays: dict[str, mx.array]) -> Content:
    """Return the checked content of a file of this version."""
    need(
        metadata.keys() == {"mlx_speculation", "version", "description", "digest"},
        f"its metadata are {shown(', '.join(sorted(metadata)))}",
    )
    said = parse_json(
        metadata["description"].encode("utf-8", "replace"), "its description"
    )
    need(
        isinstance(said, dict) and said.keys() == _DESCRIPTION,
        f"its description is not {', '.join(sorted(_DESCRIPTION))}",
    )
    user = said["metadata"]
    need(
        isinstance(user, dict) and all(isinstance(v, str) for v in user.values()),
        "the user's metadata are not texts",
    )
    rows = _rows(said["rows"], arrays)
    counts = [len(row) for row in rows]
    fields = tree.by_place(arrays)
    target = _nodes(said["caches"], "target", fields)
    tree.check_tokens(target, counts, "target")
    drafter, seen = None, said["draft_seen"]
    need(
        (seen is None) == (said["draft_caches"] is None),
        "of draft_seen and draft_caches it has one and not the other",
    )
    if said["draft_caches"] is not None:
        drafter = _nodes(said["draft_caches"], "drafter", fields)
        whole = isinstance(seen, list) and all(type(count) is int for count in seen)
        need(whole, f"draft_seen is {shown(seen)} and no list of whole numbers")
        check_seen(seen, counts)
        tree.check_tokens(drafter, seen, "drafter")
        seen = tuple(seen)
    need(not fields, f"it has arrays of {shown(min(fields, default=''))}, no cache")
    return Content(target, drafter, rows, seen, user, f"mlx-speculation {VERSION}")


def _nodes(descriptions: Any, group: str, fields: tree.Fields) -> tuple[Node, ...]:
    need(
        isinstance(descriptions, list) and bool(descriptions),
        f"its list of the {group}'s caches is {shown(descriptions)}",
    )
    nodes = [
        tree.undescribe(description, f"{group}.{i}", fields)
        for i, description in enumerate(descriptions)
    ]
    return tree.check(nodes, f"{group} cache ")


def _rows(count: Any, arrays: dict[str, mx.array]) -> Rows:
    """Take the tokens out of `arrays`."""
    need(type(count) is int and count > 0, f"it has {shown(count)} rows of tokens")
    rows = []
    for i in range(count):
        array = arrays.pop(f"tokens.{i}", None)
        need(array is not None, f"it lacks the tokens of row {i} of {count}")
        assert array is not None
        need(
            array.ndim == 1 and array.dtype == mx.int32,
            f"the tokens of row {i} are {array.shape} {array.dtype}",
        )
        row: Any = array.tolist()
        need(min(row, default=0) >= 0, f"a token of row {i} is {min(row, default=0)}")
        rows.append(tuple(row))
    return tuple(rows)


def check_seen(seen: Sequence[int], counts: Sequence[int]) -> None:
    """Require one number for each row of tokens, at most their count."""
    need(
        len(seen) == len(counts)
        and all(0 <= have <= count for have, count in zip(seen, counts, strict=True)),
        f"the drafter holds {list(seen)} of {list(counts)} tokens",
    )

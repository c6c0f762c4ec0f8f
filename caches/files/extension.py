"""Metadata of `save_caches` beyond mlx-lm's layout: tokens, the drafter, a digest.

The keys of these entries begin with `PREFIX`:

    version       the version of this extension, "1"
    description   JSON: the tokens of each row; the number of the target's caches;
                  draft_seen, how many tokens of each row the drafter's caches hold;
                  the window size of each `LayerCache`, by its place in the file
    digest        SHA-256 of the header without this entry, and of the data

mlx-lm treats the entries as user metadata.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_speculation.caches.files.safetensors_reader import need, parse_json, shown

Rows = tuple[tuple[int, ...], ...]  # the tokens of each row of a batch

VERSION = "1"
MAX_TOKEN = 2**31 - 1
PREFIX = "mlx_speculation."
_KEYS = {f"{PREFIX}{key}" for key in ("version", "description", "digest")}
_DESCRIPTION = {"rows", "target_caches", "draft_seen", "window_sizes"}


@dataclass(frozen=True, slots=True)
class Description:
    """The checked description of a file."""

    rows: Rows
    target_caches: int  # their number; the file's later caches are the drafter's
    draft_seen: tuple[int, ...] | None  # None: the drafter has no caches
    window_sizes: dict[str, int]

    def texts(self) -> dict[str, str]:
        """Return the metadata of this description, without the digest."""
        said = {key: getattr(self, key) for key in sorted(_DESCRIPTION)}
        return {
            f"{PREFIX}version": VERSION,
            f"{PREFIX}description": json.dumps(said, separators=(",", ":")),
        }


def described(user: Mapping[str, str]) -> Description | None:
    """Return the description from the user metadata; None: mlx-lm wrote the file."""
    ours = {key for key in user if key.startswith(PREFIX)}
    if not ours:
        return None
    need(
        ours == _KEYS,
        f"its metadata keys are {shown(', '.join(sorted(ours)))}, "
        f"not {', '.join(sorted(_KEYS))}",
    )
    version = user[f"{PREFIX}version"]
    need(
        version == VERSION,
        f"its layout has version {shown(version)}, but this package reads only "
        f"version {VERSION!r}",
    )
    text = user[f"{PREFIX}description"].encode("utf-8", "replace")
    said = parse_json(text, "its description")
    need(
        isinstance(said, dict) and said.keys() == _DESCRIPTION,
        "its description does not have exactly the keys "
        f"{', '.join(sorted(_DESCRIPTION))}",
    )
    rows, seen = _rows(said["rows"]), said["draft_seen"]
    if seen is not None:
        need(
            _counts(seen),
            f"draft_seen is {shown(seen)}, which is not a list of whole numbers",
        )
        check_seen(seen, [len(row) for row in rows])
        seen = tuple(seen)
    first, sizes = said["target_caches"], said["window_sizes"]
    need(
        _counts([first]) and first > 0,
        f"target_caches is {shown(first)}, which is not a whole number above 0",
    )
    need(
        isinstance(sizes, dict) and _counts([*sizes.values()]),
        f"window_sizes is {shown(sizes)}, which is not an object of whole numbers",
    )
    return Description(rows, first, seen, sizes)


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and value >= 0 for value in values
    )


def _rows(rows: Any) -> Rows:
    need(
        isinstance(rows, list) and bool(rows) and all(_counts(row) for row in rows),
        "rows is not a list of one or more lists of token ids",
    )
    largest = max((max(row, default=0) for row in rows), default=0)
    need(largest <= MAX_TOKEN, f"token id {largest} is above {MAX_TOKEN}")
    return tuple(tuple(row) for row in rows)


def check_digest(result: str, user: Mapping[str, str]) -> None:
    """Refuse a file that has changed since it was saved."""
    said = user.get(f"{PREFIX}digest")
    need(
        result == said,
        f"its content has the digest {result[:12]}, but was saved with the digest "
        f"{shown(said and said[:12])}: it has changed since",
    )


def check_seen(seen: Sequence[int], counts: Sequence[int]) -> None:
    """Require one number for each row, at most the row's number of tokens."""
    need(
        len(seen) == len(counts)
        and all(0 <= have <= count for have, count in zip(seen, counts, strict=True)),
        f"draft_seen is {list(seen)}, but has to be one number per row, at most the "
        f"row's number of tokens, {list(counts)}",
    )

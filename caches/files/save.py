"""Saving caches to a file that `mlx_lm.load_prompt_cache` reads too.

    save_caches("chat.safetensors", target_caches, tokens, draft_caches=draft_caches)
    saved = load_caches("chat.safetensors")        # saved.caches, saved.tokens, ...

The file has one list with the caches of the target and the drafter. The tokens are in
the file's metadata. The file is written completely or not at all, after the same checks
as in loading. Saving reads every array on the host and computes the file's SHA-256.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from mlx_speculation.caches.files import kinds, mlx_lm_format, safetensors_writer
from mlx_speculation.caches.files.extension import (
    MAX_TOKEN,
    PREFIX,
    Description,
    Rows,
    check_seen,
)
from mlx_speculation.caches.files.safetensors_reader import FlawError
from mlx_speculation.caches.types.leaves import checked_leaves, flat
from mlx_speculation.errors import CacheFileError, InvalidRequestError

Tokens = Sequence[int] | Sequence[Sequence[int]]


def save_caches(
    path: str | os.PathLike[str],
    caches: Sequence[Any],
    tokens: Tokens,
    *,
    draft_caches: Sequence[Any] | None = None,
    draft_seen: int | Sequence[int] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Save caches with the tokens that they hold.

    Args:
        path: the file. An old file is replaced once the new one is on the disk.
        caches: caches of the target, as `make_prompt_cache` returns them.
        tokens: the tokens that the target's caches hold; for a batch, one sequence for
            each row.
        draft_caches: caches of the drafter; None: there are none.
        draft_seen: how many of the tokens the drafter's caches hold; for a batch, one
            number for each row. None: the offset of the drafter's caches, or all tokens
            if no cache of the drafter has an offset.
        metadata: texts that loading returns in `LoadedCaches.metadata`.

    Raises:
        InvalidRequestError: the tokens do not fit the caches, or a cache's fields do
            not fit each other.
        UnsupportedCacheError: a cache is of an unknown kind.
        CacheFileError: the file cannot be written.
    """
    target = _checked(caches, "target")
    drafter = None if draft_caches is None else _checked(draft_caches, "drafter")
    rows = _rows(tokens)
    try:
        counts = [len(row) for row in rows]
        kinds.check_tokens(target, counts, "target")
        seen = None
        if drafter is not None:
            seen = _draft_seen(drafter, draft_seen, counts)
            kinds.check_tokens(drafter, list(seen), "drafter")
    except FlawError as error:
        raise InvalidRequestError(
            f"The tokens do not fit the caches: {error}. Pass the tokens that the "
            "caches hold, no more and no less."
        ) from error
    sizes = mlx_lm_format.window_sizes_of([*caches, *(draft_caches or ())])
    description = Description(rows, len(target), seen, sizes)
    user = _texts(metadata or {}) | description.texts()
    _write(path, *mlx_lm_format.native_parts([*target, *(drafter or ())], user))


def _checked(caches: Sequence[Any], whose: str) -> list[Any]:
    """Return copies of caches without unused rows; refuse contradictory fields."""
    checked_leaves(
        caches, kinds.is_known, "saved", kinds.KNOWN_KINDS, f"The {whose}'s cache"
    )
    try:
        result = kinds.copies(caches)
        kinds.check(result)
        return result
    except FlawError as error:
        raise InvalidRequestError(
            f"The {whose}'s caches cannot be saved: {error}. Save caches between two "
            "forwards, as mlx-lm's own code leaves them."
        ) from error


def _rows(tokens: Tokens) -> Rows:
    rows: Any = tokens.tolist() if isinstance(tokens, mx.array) else list(tokens)
    if not any(isinstance(row, (list, tuple)) for row in rows):
        rows = [rows]
    for row in rows:
        for token in row:
            if isinstance(token, bool) or not hasattr(token, "__index__"):
                raise InvalidRequestError(
                    f"{token!r:.60} is not a token id. Pass ints."
                )
            if not 0 <= token <= MAX_TOKEN:
                raise InvalidRequestError(
                    f"{token} is not a token id. Pass ids from 0 to {MAX_TOKEN}."
                )
    return tuple(tuple(int(token) for token in row) for row in rows)


def _draft_seen(
    caches: Sequence[Any], given: int | Sequence[int] | None, counts: list[int]
) -> tuple[int, ...]:
    if given is not None:
        seen = [given] if isinstance(given, int) else list(given)
    else:
        said = map(kinds.positions, flat(caches))
        seen = next((count for count in said if count is not None), counts)
    check_seen(seen, counts)
    return tuple(seen)


def _texts(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the user's metadata; refuse reserved keys, and values other than str."""
    if not all(isinstance(v, str) for pair in metadata.items() for v in pair):
        raise InvalidRequestError(
            "metadata has a key or value that is not a str. Pass only str."
        )
    reserved = PREFIX.removesuffix(".")
    if taken := [key for key in metadata if key.partition(".")[0] == reserved]:
        raise InvalidRequestError(
            f"metadata has the key {taken[0]!r}, but the key {reserved!r} and keys "
            f"that begin with {PREFIX!r} are reserved. Choose another."
        )
    return dict(metadata)


def _write(
    path: str | os.PathLike[str], arrays: dict[str, mx.array], metadata: dict[str, str]
) -> None:
    mx.eval(list(arrays.values()))
    try:
        safetensors_writer.write(path, arrays, metadata)
    except (OSError, ValueError, FlawError) as error:
        raise CacheFileError(
            f"{os.fspath(path)!r} cannot be written: {error}. Choose a file in a "
            "folder that exists, with room on the disk; an existing file is unchanged."
        ) from error

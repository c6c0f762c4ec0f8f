"""Loading files of caches. A file is loaded completely or refused.

    saved = load_caches("chat.safetensors", like=make_prompt_cache(model))

Files of `save_caches` have a digest. Files of mlx-lm have none, so changed numbers
inside their keys or values are not noticed.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_speculation.caches.files import (
    extension,
    kinds,
    mlx_lm_format,
    safetensors_reader,
)
from mlx_speculation.caches.files.extension import Description, Rows
from mlx_speculation.caches.files.fit import check_like
from mlx_speculation.caches.files.safetensors_reader import FlawError, need, shown
from mlx_speculation.caches.types.leaves import checked_leaves
from mlx_speculation.errors import CacheFileError, InvalidRequestError


@dataclass(frozen=True, slots=True)
class LoadedCaches:
    """Contents of a cache file."""

    caches: list[Any]  # the target's caches
    draft_caches: list[Any] | None  # the drafter's caches; None: the file has none
    rows: Rows | None  # the tokens of each row of the batch; None: a file of mlx-lm
    # For each row, how many of its tokens the drafter's caches hold; None: not known
    draft_seen: tuple[int, ...] | None
    metadata: dict[str, str]  # the user's texts
    layout: str  # "mlx-lm 0.31" or "mlx-lm 0.32"; `save_caches` writes the latter

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens of the only row."""
        if self.rows is None:
            raise InvalidRequestError(
                "The file has no tokens: it was not written by save_caches."
            )
        if len(self.rows) != 1:
            raise InvalidRequestError(
                f"The file has {len(self.rows)} rows of tokens, and `tokens` is for "
                "files with one row. Read `rows`."
            )
        return self.rows[0]


def load_caches(
    path: str | os.PathLike[str],
    *,
    like: Sequence[Any] | None = None,
    draft_like: Sequence[Any] | None = None,
    cast: bool = False,
) -> LoadedCaches:
    """Return new caches from a file of `save_caches` or `mlx_lm`'s save_prompt_cache.

    Args:
        path: the file.
        like: live caches, such as those of `make_prompt_cache(model)`. The target's
            caches in the file must have the same classes and settings, and arrays of
            the same dtypes and, except for the number of positions, the same shapes.
            None: no check.
        draft_like: likewise for the drafter. A file of mlx-lm has one list for both:
            the first `len(like)` caches are the target's, the others the drafter's.
        cast: convert floats to the dtypes of the arrays in `like`, for a model that is
            now loaded in another dtype than when the file was saved. New caches have no
            arrays: pass caches that were written to.

    Raises:
        CacheFileError: the file is missing or damaged, holds no caches, has another
            layout version, or its caches do not fit `like` or `draft_like`.
        UnsupportedCacheError: `like` has a cache of an unknown kind.
        InvalidRequestError: `draft_like` is given without `like`.
    """
    if like is None and draft_like is not None:
        raise InvalidRequestError("draft_like is given and like is not. Pass both.")
    if live := [*(like or ()), *(draft_like or ())]:
        checked_leaves(live, kinds.is_known, "loaded", kinds.KNOWN_KINDS)
    try:
        with safetensors_reader.opened(path) as (file, size):
            header = safetensors_reader.read_header(file, size)
            layout = _layout(header.metadata)
            user = mlx_lm_format.user_metadata(layout, header.metadata)
            said = extension.described(user)
            digest = None if said is None else header.digest()
            arrays = safetensors_reader.read_arrays(file, header, digest)
        if digest is not None:
            extension.check_digest(digest.hexdigest(), user)
        sizes = mlx_lm_format.window_sizes_of(live)
        sizes |= {} if said is None else said.window_sizes
        caches = mlx_lm_format.read_native(layout, header.metadata, arrays, sizes)
        cut = None if like is None or draft_like is None else len(like)
        saved = _checked(caches, said, cut, user, f"mlx-lm {layout}")
        check_like(saved.caches, like, "target", cast=cast)
        check_like(saved.draft_caches, draft_like, "drafter")
        mx.eval([cache.state for cache in caches])
    except (FlawError, OSError) as error:
        raise CacheFileError(
            f"{os.fspath(path)!r} cannot be loaded: {error}. Save it again from caches "
            "of the same model; nothing was loaded."
        ) from error
    return saved


def _layout(metadata: dict[str, str]) -> str:
    layout = mlx_lm_format.layout_of(metadata)
    if layout is None:
        raise FlawError(
            "it holds no caches: its metadata was not written by save_caches or by "
            "mlx-lm's save_prompt_cache"
        )
    return layout


def _checked(
    caches: list[Any],
    said: Description | None,
    cut: int | None,
    user: dict[str, str],
    layout: str,
) -> LoadedCaches:
    """Return the checked content of a file.

    If `said` is None, mlx-lm wrote the file. Then its first `cut` caches are the
    target's; if `cut` is None, all are.
    """
    first, rows, seen, listed = cut, None, None, cut is not None
    if said is not None:
        first, rows, seen = said.target_caches, said.rows, said.draft_seen
        need(
            (seen is None) == (first == len(caches)) and first <= len(caches),
            f"it has {len(caches)} caches, target_caches is {first} and draft_seen is "
            f"{shown(seen)}, which contradict each other",
        )
        listed = seen is not None
        user = {k: v for k, v in user.items() if not k.startswith(extension.PREFIX)}
    target, drafter = caches[:first], None
    kinds.check(target, "target cache ")
    if rows is not None:
        kinds.check_tokens(target, [len(row) for row in rows], "target")
    if listed:
        drafter = caches[first:]
        kinds.check(drafter, "drafter cache ")
    if seen is not None and drafter is not None:
        kinds.check_tokens(drafter, list(seen), "drafter")
    return LoadedCaches(target, drafter, rows, seen, user, layout)

"""Loading files of caches. A file is loaded as a whole, or refused.

    saved = load_caches("chat.safetensors", like=make_prompt_cache(model))
    load_into("chat.safetensors", caches, draft_caches)    # the same objects, refilled

Before the first cache is made or changed, the file's fields are checked against each
other, against its tokens and against the given caches. Files of `save_caches` have a
digest; in files of mlx-lm, changed numbers inside of keys or values are not noticed.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_speculation.caches.files import (
    extension,
    mlx_lm_format,
    safetensors_reader,
    tree,
)
from mlx_speculation.caches.files.codecs import KNOWN_KINDS, attributes_for, is_known
from mlx_speculation.caches.files.extension import Content, Description
from mlx_speculation.caches.files.fit import cast_to, check_like, pairs_of
from mlx_speculation.caches.files.safetensors_reader import FlawError, Header
from mlx_speculation.caches.files.tree import Rows
from mlx_speculation.caches.types.leaves import assign, checked_leaves
from mlx_speculation.errors import CacheFileError, InvalidRequestError


@dataclass(frozen=True, slots=True)
class LoadedCaches:
    """Contents of a cache file."""

    caches: list[Any]  # the target's caches
    draft_caches: list[Any] | None  # the drafter's caches; None: the file has none
    rows: Rows | None  # the tokens of each row of the batch; None: a file of mlx-lm
    # For each row, how many of its tokens the drafter's caches hold
    draft_seen: tuple[int, ...] | None
    metadata: dict[str, str]  # the user's texts
    layout: str  # "mlx-lm 0.32", also for files of `save_caches`, or "mlx-lm 0.31"

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens of the only row."""
        if self.rows is None or len(self.rows) != 1:
            count = "no" if self.rows is None else len(self.rows)
            raise InvalidRequestError(f"The file has {count} rows of tokens, not one.")
        return self.rows[0]


def load_caches(
    path: str | os.PathLike[str],
    *,
    like: Sequence[Any] | None = None,
    draft_like: Sequence[Any] | None = None,
) -> LoadedCaches:
    """Return new caches from a file of `save_caches` or `mlx_lm`'s save_prompt_cache.

    Args:
        path: the file.
        like: live caches, such as those of `make_prompt_cache(model)`. The target's
            caches in the file must have the same classes and settings, and the shapes
            and dtypes of the arrays in `like`. None: no check.
        draft_like: likewise for the drafter. If mlx-lm saved the file, it has one list
            for both, which is cut after `len(like)`.

    Raises:
        CacheFileError: the file is missing, damaged, no cache file, of another version,
            or does not match.
        UnsupportedCacheError: `like` has a cache of an unknown kind.
        InvalidRequestError: `draft_like` without `like`.
    """
    content = _content(path, like, draft_like)
    drafter = content.drafter
    return _loaded(
        content,
        tree.build_all(content.target),
        None if drafter is None else tree.build_all(drafter),
    )


def load_into(
    path: str | os.PathLike[str],  # the file
    caches: Sequence[Any],  # the target's caches
    draft_caches: Sequence[Any] | None = None,  # the drafter's; None: there are none
    *,
    # Convert floats to the dtypes of `caches`, as far as these hold arrays: the model
    # may have been loaded in another dtype since
    cast: bool = False,
) -> LoadedCaches:
    """Fill existing caches with the content of a file, all of them or none.

    The result has the same objects. Without `draft_caches`, those in the file are
    ignored. The errors are those of `load_caches`; after one, no cache has changed.
    """
    content = _content(path, caches, draft_caches, cast=cast)
    pairs = list(pairs_of(content.target, caches))
    if draft_caches is not None:
        assert content.drafter is not None
        pairs += pairs_of(content.drafter, draft_caches)
    new = [attributes_for(live, leaf) for leaf, live in pairs]
    mx.eval(new)
    result = _loaded(
        content, list(caches), None if draft_caches is None else list(draft_caches)
    )
    assign([live for _, live in pairs], new)
    return result


def _loaded(
    content: Content, caches: list[Any], draft_caches: list[Any] | None
) -> LoadedCaches:
    return LoadedCaches(
        caches,
        draft_caches,
        content.rows,
        content.draft_seen,
        content.metadata,
        content.layout,
    )


def _content(
    path: str | os.PathLike[str],
    like: Sequence[Any] | None,
    draft_like: Sequence[Any] | None,
    *,
    cast: bool = False,
) -> Content:
    if like is None and draft_like is not None:
        raise InvalidRequestError("draft_like is given and like is not. Pass both.")
    if live := [*(like or ()), *(draft_like or ())]:
        checked_leaves(live, is_known, "loaded", KNOWN_KINDS)
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
        content = _checked(layout, header, arrays, said, like, draft_like)
        if cast and like is not None:
            cast_to(like, content.target)
        check_like(content, like, draft_like)
        nodes = (*content.target, *(content.drafter or ()))
        mx.eval([leaf.arrays for leaf in tree.leaves(nodes)])
    except (FlawError, OSError) as error:
        raise CacheFileError(
            f"{os.fspath(path)!r} cannot be loaded: {error}. Save it again from caches "
            "of the same model; nothing was taken from it."
        ) from error
    return content


def _layout(metadata: dict[str, str]) -> str:
    layout = mlx_lm_format.layout_of(metadata)
    if layout is None:
        raise FlawError(
            "it holds no caches: its metadata are not those of save_caches or of "
            "mlx-lm's save_prompt_cache"
        )
    return layout


def _checked(
    layout: str,
    header: Header,
    arrays: dict[str, mx.array],
    said: Description | None,
    like: Sequence[Any] | None,
    draft_like: Sequence[Any] | None,
) -> Content:
    live = [*(like or ()), *(draft_like or ())]
    sizes = {} if said is None else said.window_sizes
    nodes = mlx_lm_format.read_native(layout, header.metadata, arrays, live, sizes)
    user = mlx_lm_format.user_metadata(layout, header.metadata)
    name = f"mlx-lm {layout}"
    if said is not None:
        metadata = {k: v for k, v in user.items() if not k.startswith(extension.PREFIX)}
        return said.content(nodes, metadata, name)
    first = len(like) if like is not None and draft_like is not None else len(nodes)
    target = tree.check(nodes[:first])
    drafter = None if draft_like is None else tree.check(nodes[first:])
    return Content(target, drafter, None, None, user, name)

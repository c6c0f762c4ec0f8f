"""What drafts: checked when a generator is made, and made anew for each stream."""

from functools import partial
from typing import Any

import mlx.nn as nn

from mlx_speculation.caches import check_single, check_supported, leaves, position
from mlx_speculation.engine.draft_model import DraftModel
from mlx_speculation.engine.drafting import Drafter
from mlx_speculation.engine.sequence import Sequence
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import Lane, Sliding


def checked_draft(draft: Any) -> nn.Module | Drafter | None:
    """Return the draft of a generator, or refuse what is none."""
    if draft is None or isinstance(draft, nn.Module | Drafter):
        return draft
    raise InvalidRequestError(
        f"draft is a {type(draft).__name__}, and an mlx-lm model, a Drafter or None is "
        "needed. To load one from a path use SpeculativeGenerator.from_pretrained."
    )


def check_draft_width(width: int, highest_id: int) -> None:
    """Refuse a draft that has no row for a token that it would be fed."""
    if width <= highest_id:
        raise InvalidRequestError(
            f"The draft has {width} token ids, and the target's go up to {highest_id}. "
            "Choose a draft that knows every token of the target."
        )


def make_draft_model(
    draft: nn.Module,
    sliding: Sliding,
    target: Lane,
    draft_cache: list[Any] | None,
    sequence: Sequence,
) -> DraftModel:
    """Return the drafter of one stream that drafts with a model.

    Args:
        draft: the model.
        sliding: the caches in place of rings, see `Lane`.
        target: the target's lane.
        draft_cache: the caller's caches of the draft model, or None.
        sequence: the tokens that are known.
    """
    make = partial(Lane, draft, sliding=sliding)
    if draft_cache is None:
        return DraftModel(make, make())
    check_supported(draft_cache)
    check_single(draft_cache)
    _check_apart(target.caches, draft_cache)
    seen = _checked_lag(position(draft_cache), target.seen, sequence.start)
    return DraftModel(make, Lane(draft, draft_cache, seen, sliding=sliding))


def _checked_lag(held: int | None, seen: int, start: int) -> int:
    """Return how many known tokens the draft's caches hold, given their offset."""
    if held is None or held == start + seen:
        return seen
    if start == 0 and held < seen:
        return held
    raise InvalidRequestError(
        f"draft_cache holds {held} tokens and prompt_cache {start + seen}. Pass caches "
        "that hold the same tokens or, with cached_tokens, a beginning of them."
    )


def _check_apart(target: list[Any], draft: list[Any]) -> None:
    """Refuse caches that both lanes would write to."""
    places = {id(leaf): place for place, leaf in leaves(target)}
    for place, leaf in leaves(draft):
        if id(leaf) in places:
            raise InvalidRequestError(
                f"Layer {place} of the draft's caches is the {type(leaf).__name__} of "
                f"the target's layer {places[id(leaf)]}. Make the draft's own with "
                "make_prompt_cache(draft_model)."
            )

"""What drafts: checked when a generator is made, and made anew for each stream."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

import mlx.nn as nn

from mlx_speculation.caches import check_single, check_supported, leaves, position
from mlx_speculation.engine.draft_length.constant_drafter import ConstantDrafter
from mlx_speculation.engine.drafters.base import Drafter, DrafterWrapper
from mlx_speculation.engine.drafters.cascade import Cascade
from mlx_speculation.engine.drafters.draft_model import DraftModel
from mlx_speculation.engine.drafters.fault_guard import FaultGuard
from mlx_speculation.engine.drafters.head_source import Following
from mlx_speculation.engine.lookup.drafter import LookupDrafter
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.engine.stats import DrafterFault
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import CompiledForward, Lane, ReducedOutput, Sliding

# No draft by measurement is longer. Greedy text that repeats itself is drafted well for
# longer than that, but a verify of more rows costs by the row.
LONGEST = 16

MakeModel = Callable[[nn.Module], DraftModel]
Follow = Callable[[Following], Drafter]
NoteFault = Callable[[DrafterFault], None]
Checked = nn.Module | Drafter | Following


def checked_draft(draft: Any, target: nn.Module | None = None) -> Checked | None:
    """Return the draft of a generator, or refuse what is none.

    Args:
        draft: what was passed.
        target: the model that a head has to be of; None: any.
    """
    if isinstance(draft, str) and draft == "lookup":
        return LookupDrafter()
    if isinstance(draft, Cascade):
        return _checked_cascade(draft, target)
    if isinstance(draft, Following) and target is not None:
        _check_own_head(draft, target)
    if draft is None or isinstance(draft, nn.Module | Drafter | Following):
        return draft
    raise InvalidRequestError(
        f"draft is a {type(draft).__name__}, and an mlx-lm model, a Drafter, an "
        "MtpDraft, 'lookup' or None is needed. To load one from a path use "
        "SpeculativeGenerator.from_pretrained."
    )


def _check_own_head(draft: Following, target: nn.Module) -> None:
    if draft.model is not target:
        raise InvalidRequestError(
            f"The head in {type(draft).__name__} was put on another model than the "
            "generator's. Make it with the same model object."
        )


def _checked_cascade(cascade: Cascade, target: nn.Module | None) -> Cascade:
    checked = [_checked_member(member, target) for member in cascade.drafters]
    heads = sum(isinstance(member, Following) for member in checked)
    if heads > 1:
        raise InvalidRequestError(
            f"The cascade has {heads} heads, and one can follow a target. Leave "
            "the others out."
        )
    return Cascade(*checked)


def _checked_member(member: Any, target: nn.Module | None) -> Checked:
    checked = checked_draft(member, target)
    if checked is None:
        raise InvalidRequestError(
            "A member of the cascade is None, and mlx-lm models and drafters are "
            "needed. Leave it out."
        )
    return checked


def checked_confidence(confidence: Any, draft: Any) -> float:
    """Return the confidence at which a draft model goes on, if there is one."""
    if not isinstance(confidence, int | float) or not 0 <= confidence < 1:
        raise InvalidRequestError(
            f"draft_confidence is {confidence!r}, and a probability of at least 0 and "
            "less than 1 is needed."
        )
    if confidence and draft is not None and not models_of(draft):
        raise InvalidRequestError(
            f"draft_confidence is {confidence!r}, and no draft model is there to be "
            f"asked for it: the draft is of kind {type(draft).__name__}. Leave it out."
        )
    return float(confidence)


def members(draft: Any) -> list[Any]:
    """Return the models and drafters in the draft of a generator or of a stream."""
    if isinstance(draft, Cascade):
        return [found for member in draft.drafters for found in members(member)]
    if isinstance(draft, DrafterWrapper):
        return members(draft.inner)
    if isinstance(draft, FaultGuard):
        return members(draft.drafter)
    return [] if draft is None else [draft]


def models_of(draft: Any) -> list[nn.Module]:
    """Return the models that draft, in the order in which they are asked."""
    return [member for member in members(draft) if isinstance(member, nn.Module)]


def heads_of(draft: Any) -> list[Following]:
    """Return the drafts that read what their target computes."""
    return [member for member in members(draft) if isinstance(member, Following)]


def lanes_of(drafter: Any) -> list[Lane | None]:
    """Return the lanes of a stream's drafter, in the order of `models_of`.

    None stands for that of a model that was set aside: what it holds is not known.
    """
    if isinstance(drafter, DrafterWrapper):
        return lanes_of(drafter.inner)
    if isinstance(drafter, Cascade):
        return [lane for member in drafter.drafters for lane in lanes_of(member)]
    aside = isinstance(drafter, FaultGuard) and drafter.set_aside
    models = [m for m in members(drafter) if isinstance(m, DraftModel)]
    return [None if aside else model.lane for model in models]


def drafter_of_stream(
    draft: Any, make_model: MakeModel, follow: Follow, note: NoteFault, target: Lane
) -> Drafter | None:
    """Return what drafts in one stream; the user's own drafters as they are.

    Args:
        draft: the draft of the generator.
        make_model: makes a drafter of a model.
        follow: makes a drafter of a head that follows the target's lane.
        note: gets the faults of drafters. Each is contained by itself, so that the
            others of a cascade go on.
        target: the target's lane.
    """
    if draft is None:
        return None
    if isinstance(draft, Cascade):
        each = [
            drafter_of_stream(member, make_model, follow, note, target)
            for member in draft.drafters
        ]
        return Cascade(*each)
    if isinstance(draft, nn.Module):
        return FaultGuard(make_model(draft), note)
    if isinstance(draft, Following):
        return FaultGuard(follow(draft), note, target)
    own = draft.for_stream() if isinstance(draft, LookupDrafter) else draft
    return FaultGuard(own, note)


# Made anew for each stream, or without a state.
_FOR_MANY = (nn.Module, LookupDrafter, Following, ConstantDrafter)


def serves_one_stream(draft: Any) -> bool:
    """Whether there is a drafter that cannot be made anew for each stream."""
    return any(not isinstance(m, _FOR_MANY) for m in members(draft))


def remember(drafter: Any, tokens: SequenceOf[int]) -> None:
    """Let lookups keep the tokens of a finished stream."""
    for member in members(drafter):
        if isinstance(member, LookupDrafter):
            member.remember(tokens)


def ends_early(draft: Any) -> bool:
    """Whether a drafter asks if a further token is wanted.

    See `engine.draft_length.early_stop`.
    """
    return isinstance(draft, nn.Module) or getattr(draft, "ends_early", False) is True


def measured_draft(draft: Any) -> Any:
    """Return a draft without its lookups: what they propose depends on the text."""
    others = [m for m in members(draft) if not isinstance(m, LookupDrafter)]
    if len(others) > 1:
        return Cascade(*others)
    return others[0] if others else ConstantDrafter()


def check_head_ids(draft: Any, highest_id: int) -> None:
    """Refuse heads that know other token ids than the target."""
    for head in heads_of(draft):
        head.check_ids(highest_id)


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
    confidence: float,
    reduced: ReducedOutput | None = None,
    compiled: CompiledForward | None = None,
) -> DraftModel:
    """Return the drafter of one stream that drafts with a model.

    Args:
        draft: the model.
        sliding: the caches in place of rings, see `Lane`.
        target: the target's lane.
        draft_cache: the caller's caches of the draft model, or None.
        sequence: the tokens that are known.
        confidence: see `DraftModel`.
        reduced: see `DraftModel`.
        compiled: the draft model's compiled forward, or None.
    """
    step = target.prefill_step

    def make(*held: Any) -> Lane:
        lane = Lane(draft, *held, sliding=sliding)
        lane.prefill_step = step
        lane.compiled = compiled
        lane.guesses = True
        return lane

    options: dict[str, Any] = {"confidence": confidence, "reduced": reduced}
    if draft_cache is None:
        return DraftModel(make, make(), **options)
    check_supported(draft_cache)
    check_single(draft_cache)
    _check_apart(target.caches, draft_cache)
    seen = _checked_lag(position(draft_cache), target.seen, sequence.start)
    return DraftModel(make, make(draft_cache, seen), **options)


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

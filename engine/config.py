"""What a generator is made with: every option checked once, and kept in one place."""

import weakref
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

from mlx_speculation.caches import FixedShape, PrefixCache
from mlx_speculation.engine.argument_checks import (
    checked_choice,
    checked_count,
    checked_exact,
)
from mlx_speculation.engine.distributed import RankedTarget, all_or_none
from mlx_speculation.engine.draft_length.policy_factory import PolicyFactory
from mlx_speculation.engine.drafters.reduced_vocabulary import (
    DraftVocabulary,
    checked_vocabulary,
)
from mlx_speculation.engine.drafters.resolve import resolve
from mlx_speculation.engine.drafters.source import (
    Draft,
    DraftOptions,
    HeadDraft,
    TargetInfo,
    members_of,
)
from mlx_speculation.engine.exact_verdict import check_verdict
from mlx_speculation.engine.prompt import Prompts
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.interrupts import finalize
from mlx_speculation.models import (
    Group,
    Lane,
    ModelHooks,
    Sliding,
    TokenIds,
    TreeHooks,
    check_causal,
    check_fixed_shape,
    check_resumable,
    check_tree_model,
    compiled_steps,
    context_length,
    evaluate_held,
    logit_width,
    position_table,
    wrapped,
)
from mlx_speculation.samplers import Acceptance
from mlx_speculation.warn import notice

MOST_NODES = 64  # of a tree


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, weakref_slot=True)
class GeneratorConfig:
    """What all streams of a generator share.

    When it is dropped, so are the recorders in its models: whatever runs keeps it.
    """

    model: nn.Module  # the target
    tokenizer: Any  # the target's, in mlx-lm's wrapper
    ids: TokenIds  # the token ids that the tokenizer knows
    target_width: int  # the logits of a row of the target
    prompts: Prompts  # checks and encodes
    # The target on the ranks that it is spread over; None: it is whole
    ranked: RankedTarget | None
    draft: Draft | None  # what drafts, on this rank; None: plain decoding
    notices: tuple[str, ...]  # why the draft is not another
    lengths: PolicyFactory  # the draft lengths
    acceptance: Acceptance  # the rule
    sliding: Sliding  # what stands for sliding windows in the caches made here
    # What requests leave for later ones; None: nothing
    prefix_cache: PrefixCache | None
    kept_head: int | None  # the index in it of a head; None: it keeps none
    shape: FixedShape | None  # of every forward of the target; None: not in exact mode
    tree: int  # the nodes of a draft that is a tree; 0: drafts are chains

    @property
    def decides(self) -> bool:
        """Whether this rank drafts and decides, as the only one does too."""
        return self.ranked is None or self.ranked.leads

    @property
    def draft_models(self) -> SequenceOf[nn.Module]:
        """The draft models, in the order in which they are asked."""
        return () if self.draft is None else self.draft.models


def checked_setup(
    model: nn.Module,
    tokenizer: Any,
    *,
    draft: Any,
    draft_length: int | None,
    draft_tree: int | None,
    draft_confidence: float,
    acceptance: Acceptance,
    sliding: Sliding,
    prefix_cache: PrefixCache | None,
    draft_vocabulary: DraftVocabulary | None,
    compile_draft: bool,
    group: Group | None,
    exact: bool | int,
) -> GeneratorConfig:
    """Check what a generator is made with; see `SpeculativeGenerator`.

    Raises:
        InvalidRequestError: an argument is out of range or of the wrong kind.
        SpeculationError: whatever else the constructor of a generator names.
    """
    _check_kinds(model, acceptance, sliding)
    shape = checked_exact(exact)
    ranked = RankedTarget.of(model, group)
    with all_or_none(ranked):
        leads = ranked is None or ranked.leads
        own = wrapped(tokenizer)
        ids, width = TokenIds.of(tokenizer), logit_width(model)
        target = TargetInfo(model, own, None, min(ids.width, width) - 1)
        common = _is_intersection(draft_vocabulary)
        found = resolve(draft, target, follower=not leads, foreign=common)
        source = found.source
        if draft is not None:
            check_causal(model)
        if shape is not None:
            _check_exact(model, acceptance, sliding, ranked, shape)
        if ranked is not None:
            source = ranked.own_draft(source, prefix_cache)
            if not ranked.leads:
                draft_vocabulary = None
        models = [] if source is None else source.models
        _check_compiled(compile_draft, models, draft_vocabulary)
        _check_confidence(draft_confidence, source)
        tree = _checked_tree(draft_tree, source, shape, ranked)
        lengths = PolicyFactory(
            model,
            source,
            sliding,
            found.length if draft_length is None else draft_length,
            compiled=compile_draft,
            shape=shape,
            tree=tree,
        )
        for module in (model, *models):  # refuses unknown caches, not in a stream
            Lane(module, sliding=sliding, shape=shape if module is model else None)
        if source is not None:
            source.check(target)
        options = DraftOptions(
            sliding=sliding,
            confidence=float(draft_confidence),
            vocabulary=None
            if common
            else _vocabulary(draft_vocabulary, source, target),
            compiled=compiled_steps if compile_draft else None,
        )
        kept: int | None = None
        if prefix_cache is not None:
            kept = _bind(prefix_cache, [model, *models], source, sliding, shape)
        with ExitStack() as hooks:
            for module in (model, *models):
                hooks.callback(ModelHooks(module).remove)
            if tree:
                drafting = (m.own_weights for m in members_of(source) if m.trees)
                for each in (model, *drafting):
                    if each is not None:
                        hooks.callback(TreeHooks(each).remove)
                check_tree_model(model, target.highest_id)
            prompts = Prompts(
                own, target.highest_id, context_length(model), position_table(model)
            )
            setup = GeneratorConfig(
                model=model,
                tokenizer=own,
                ids=ids,
                target_width=width,
                prompts=prompts,
                ranked=ranked,
                draft=None if source is None else source.configured(options),
                notices=(*found.notices, *_pauses(models, prompts.context_length)),
                lengths=lengths,
                acceptance=acceptance,
                sliding=sliding,
                prefix_cache=prefix_cache,
                kept_head=kept,
                shape=shape,
                tree=tree,
            )
            # For streams in other threads; the checks have built their forwards by now.
            heads = [each for each in members_of(setup.draft) if each.follows]
            evaluate_held(model, *models, *heads)
            drop = weakref.finalize(setup, finalize, hooks.pop_all().close)
            drop.atexit = False  # a stream of a daemon thread may run still
    return setup


def _pauses(models: SequenceOf[nn.Module], longest: int | None) -> list[str]:
    """Say which draft models pause in texts that the target can go on with."""
    said = [
        f"The draft has a table of {count} positions, and the target "
        + (f"goes on to {longest}" if longest else "may go on")
        + ": longer texts are decoded without it."
        for each in models
        if (count := position_table(each)) and (longest is None or longest > count)
    ]
    for each in said:
        notice(each)
    return said


def _check_kinds(model: Any, acceptance: Any, sliding: Any) -> None:
    """Refuse what is no model, no rule and no kind of cache."""
    checked_choice("acceptance", acceptance, Acceptance)
    checked_choice("sliding", sliding, Sliding)
    if not isinstance(model, nn.Module):
        raise InvalidRequestError(
            f"model is a {type(model).__name__}, and an mlx-lm model is needed. "
            "Load one with mlx_speculation.load(path)."
        )


def _check_exact(
    model: nn.Module,
    acceptance: Acceptance,
    sliding: Sliding,
    ranked: RankedTarget | None,
    shape: FixedShape,
) -> None:
    """Refuse what cannot keep the promise of exact mode.

    Raises:
        InvalidRequestError: of two options that do not go together, or rows were seen
            to differ here.
        UnsupportedModelError: the model was not tried in a fixed shape.
    """
    refused = {
        f"acceptance={acceptance!r}, under which a draft changes the text of a seed": (
            acceptance != "keyed"
        ),
        "sliding='native', whose rings are not read in order": sliding == "native",
        "a target that is spread over ranks, whose sums depend on them": (
            ranked is not None
        ),
    }
    for what, is_so in refused.items():
        if is_so:
            raise InvalidRequestError(
                f"exact={shape.rows} was passed, and {what}. Leave one of them out."
            )
    check_fixed_shape(model)
    check_verdict(model, shape)


def _check_compiled(
    compile_draft: Any, models: SequenceOf[nn.Module], vocabulary: Any
) -> None:
    """Refuse to compile what is no draft model, or is one with fewer token ids."""
    if not isinstance(compile_draft, bool):
        raise InvalidRequestError(
            f"compile_draft is {compile_draft!r}, and True or False is needed."
        )
    if compile_draft and not models:
        raise InvalidRequestError(
            "compile_draft is True, and there is no draft model. Leave it out."
        )
    if compile_draft and vocabulary is not None:
        raise InvalidRequestError(
            "compile_draft and draft_vocabulary were passed, and a compiled draft has "
            "all token ids. Leave one of them out."
        )


def _check_confidence(confidence: Any, draft: Draft | None) -> None:
    """Refuse what is no probability, or finds nobody to be asked for it."""
    if not isinstance(confidence, int | float) or not 0 <= confidence < 1:
        raise InvalidRequestError(
            f"draft_confidence is {confidence!r}, and a probability of at least 0 and "
            "less than 1 is needed."
        )
    if confidence and draft is not None and not draft.confident:
        raise InvalidRequestError(
            f"draft_confidence is {confidence!r}, and no draft model is there to be "
            f"asked for it: the draft is of kind {draft.kind!r}. Leave it out."
        )


def _checked_tree(
    nodes: Any,
    draft: Draft | None,
    shape: FixedShape | None,
    ranked: RankedTarget | None,
) -> int:
    """Return how many nodes drafts have that are trees; 0: they are chains.

    Raises:
        InvalidRequestError: it is no number from 2 to 64, or nothing drafts trees.
    """
    if nodes is None:
        return 0
    if checked_count("draft_tree", nodes, 2, ", or None for chains") > MOST_NODES:
        raise InvalidRequestError(
            f"draft_tree is {nodes}, and {MOST_NODES} nodes are the most. Pass 15: "
            "rows of the target cost more than the last nodes bring."
        )
    for what, is_so in (("exact", shape), ("group", ranked)):
        if is_so is not None:
            raise InvalidRequestError(
                f"draft_tree is {nodes}, and {what} was passed, with which drafts are "
                "chains. Leave one of them out."
            )
    if draft is None or not draft.trees:
        kind = "None" if draft is None else f"of kind {draft.kind!r}"
        raise InvalidRequestError(
            f"draft_tree is {nodes}, and the draft is {kind}, which drafts chains. "
            "Pass an EAGLE-3 head without a window, or leave draft_tree out."
        )
    return int(nodes)


def _is_intersection(vocabulary: Any) -> bool:
    """Return whether to draft the tokens that a draft of another family shares."""
    if isinstance(vocabulary, str) and vocabulary != "intersection":
        raise InvalidRequestError(
            f"draft_vocabulary is {vocabulary!r}, and 'intersection', token ids or "
            "None are needed."
        )
    return isinstance(vocabulary, str)


def _vocabulary(ids: Any, draft: Draft | None, target: TargetInfo) -> list[int] | None:
    """Return the ids to draft from; None: all.

    Raises:
        InvalidRequestError: the ids are none of the target's, or nothing reads them.
    """
    if ids is None:
        return None
    found = checked_vocabulary(ids, target.highest_id + 1)
    if not any(member.reducible for member in members_of(draft)):
        kind = "None" if draft is None else f"of kind {draft.kind!r}"
        raise InvalidRequestError(
            f"draft_vocabulary was passed, and the draft is {kind}, without a model "
            "or an MTP head to reduce. Leave it out."
        )
    return found


def _bind(
    cache: PrefixCache,
    models: list[nn.Module],
    draft: Draft | None,
    sliding: Sliding,
    shape: FixedShape | None,
) -> int | None:
    """Let a prefix cache belong to the target and the draft models.

    Returns:
        The index of a head whose rows it keeps; None: there is none.
    """
    for module in models:
        check_resumable(module)
    empty = [Lane(module, sliding=sliding).caches for module in models]
    cache.bind(models, empty, shape)
    for member in members_of(draft):
        made = member.new_cache(0) if isinstance(member, HeadDraft) else None
        kept = None if made is None else made.kept()
        if kept is not None:
            return cache.bind_head(member.own_weights, kept[0])
    return None

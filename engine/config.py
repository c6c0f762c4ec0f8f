"""The configuration of a generator: its options checked against the models."""

import weakref
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.nn as nn

from mlx_speculation.engine.distributed import RankedTarget
from mlx_speculation.engine.draft_length.policy_factory import PolicyFactory
from mlx_speculation.engine.drafters.draft import (
    Draft,
    DraftOptions,
    TargetInfo,
    members_of,
)
from mlx_speculation.engine.drafters.reduced_vocabulary import checked_vocabulary
from mlx_speculation.engine.drafters.resolve import Resolved, resolve
from mlx_speculation.engine.options import GeneratorOptions
from mlx_speculation.engine.prompt import Prompts, replayed
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.interrupts import finalize
from mlx_speculation.models import (
    Lane,
    ModelHooks,
    TokenIds,
    TreeHooks,
    check_causal,
    check_resumable,
    check_tree_model,
    compiled_steps,
    context_length,
    evaluate_held,
    logit_width,
    position_table,
    wrapped,
)
from mlx_speculation.warn import notice


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, weakref_slot=True)
class GeneratorConfig:
    """Configuration that all streams of a generator share.

    The hooks in the models are removed when this object is garbage-collected, so every
    running stream keeps a reference to it.
    """

    model: nn.Module  # the target
    tokenizer: Any  # the target's, in mlx-lm's wrapper
    ids: TokenIds  # the token ids that the tokenizer knows
    target_width: int  # number of logits in a row of the target
    prompts: Prompts
    ranked: RankedTarget | None  # None: the target is not sharded
    draft: Draft | None  # the draft of this rank; None: this rank drafts nothing
    notices: tuple[str, ...]  # on how the draft was chosen, and on its position table
    lengths: PolicyFactory
    options: GeneratorOptions  # as passed
    # The index, in the prefix cache, of the head whose rows it keeps; None: no head
    kept_head: int | None

    @property
    def decides(self) -> bool:
        """Return whether this rank drafts and decides: rank 0, or the only rank."""
        return self.ranked is None or self.ranked.group.leads

    @property
    def draft_models(self) -> SequenceOf[nn.Module]:
        """The draft models, in the order of the draft's members."""
        return () if self.draft is None else self.draft.models


def make_config(
    model: nn.Module, tokenizer: Any, options: GeneratorOptions
) -> GeneratorConfig:
    """Check a generator's options against its target; see `SpeculativeGenerator`."""
    if not isinstance(model, nn.Module):
        raise InvalidRequestError(
            f"model is a {type(model).__name__}, and an mlx-lm model is needed. "
            "Load one with mlx_speculation.load(path)."
        )
    ranked = RankedTarget.of(model, options.group)
    with nullcontext() if ranked is None else ranked.group.all_or_none():
        wrapper = wrapped(tokenizer)
        ids, width = TokenIds.of(tokenizer), logit_width(model)
        target = TargetInfo(model, wrapper, None, min(ids.width, width) - 1)
        resolved = _resolved(target, options, ranked)
        draft = resolved.draft
        models = [] if draft is None else draft.models
        shape, sliding = options.shape, options.sliding
        for module in (model, *models):  # refuse unknown caches before any stream does
            Lane(module, sliding=sliding, shape=shape if module is model else None)
        prompts = Prompts(
            wrapper,
            target.highest_id,
            context_length(model),
            position_table(model),
            partial(replayed, options.prefix_cache, wrapper)
            if options.replay and options.prefix_cache is not None
            else list,
        )
        reduces = not options.intersection and (ranked is None or ranked.group.leads)
        drafting = DraftOptions(
            sliding=options.sliding,
            vocabulary=_vocabulary(options.draft_vocabulary, draft, target)
            if reduces
            else None,
            history=options.acceptance == "keyed",
            compiled=compiled_steps if options.compile_draft else None,
        )
        config = GeneratorConfig(
            model=model,
            tokenizer=wrapper,
            ids=ids,
            target_width=width,
            prompts=prompts,
            ranked=ranked,
            draft=draft,
            notices=(*resolved.notices, *_pauses(models, prompts.context_length)),
            lengths=_lengths(model, resolved, options),
            options=options,
            kept_head=_bind(model, draft, options),
        )
        return _hooked(config, drafting)


def _lengths(
    model: nn.Module, resolved: Resolved, options: GeneratorOptions
) -> PolicyFactory:
    """Return the policy factory; a length in `options` overrides that of `resolved`."""
    length = options.draft_length
    return PolicyFactory(
        model,
        resolved.draft,
        resolved.length if length is None else length,
        shape=options.shape,
        sliding=options.sliding,
        compiled=options.compile_draft,
        tree=options.tree,
    )


def _resolved(
    target: TargetInfo, options: GeneratorOptions, ranked: RankedTarget | None
) -> Resolved:
    """Resolve the draft of this rank; check it against the target and the options."""
    leads = ranked is None or ranked.group.leads
    resolved = resolve(
        options.draft, target, follower=not leads, foreign=options.intersection
    )
    if options.draft is not None:
        check_causal(target.model)
    options.check_exact(target.model, ranked=ranked is not None)
    if ranked is not None:
        draft = ranked.own_draft(resolved.draft, options.prefix_cache)
        resolved = replace(resolved, draft=draft)
    reduced = leads and options.draft_vocabulary is not None
    options.check_draft(resolved.draft, vocabulary=reduced)
    if resolved.draft is not None:
        resolved.draft.check(target)
    return resolved


def _hooked(config: GeneratorConfig, options: DraftOptions) -> GeneratorConfig:
    """Hook the models for as long as the returned config lives."""
    draft, model = config.draft, config.model
    models = config.draft_models
    with ExitStack() as hooks:
        for module in (model, *models):
            hooks.callback(ModelHooks(module).remove)
        if config.options.tree:
            drafting = (m.own_weights for m in members_of(draft) if m.trees)
            for each in (model, *drafting):
                if each is not None:
                    hooks.callback(TreeHooks(each).remove)
            check_tree_model(model, config.prompts.highest_id)
        if draft is not None:
            config = replace(config, draft=draft.configured(options))
        # A stream in another thread could not evaluate lazy arrays of this thread.
        heads = [each for each in members_of(config.draft) if each.follows]
        evaluate_held(model, *models, *heads)
        drop = weakref.finalize(config, finalize, hooks.pop_all().close)
        drop.atexit = False  # a stream of a daemon thread may still run
    return config


def _pauses(models: SequenceOf[nn.Module], longest: int | None) -> list[str]:
    """Show and return a notice on each draft model with too short a position table."""
    said = [
        f"The draft has only {count} positions, and the target "
        + (f"has {longest}" if longest else "may have more")
        + f": after {count} positions, texts are decoded without the draft."
        for each in models
        if (count := position_table(each)) and (longest is None or longest > count)
    ]
    for each in said:
        notice(each)
    return said


def _vocabulary(ids: Any, draft: Draft | None, target: TargetInfo) -> list[int] | None:
    """Return the checked ids to draft from; None: all."""
    if ids is None:
        return None
    result = checked_vocabulary(ids, target.highest_id + 1)
    if not any(member.reducible for member in members_of(draft)):
        kind = "None" if draft is None else f"of kind {draft.kind!r}"
        raise InvalidRequestError(
            "draft_vocabulary reduces the vocabulary of a draft model or an MTP head, "
            f"but the draft is {kind}. Leave draft_vocabulary out."
        )
    return result


def _bind(
    model: nn.Module, draft: Draft | None, options: GeneratorOptions
) -> int | None:
    """Bind the prefix cache to the models; return the index of the kept head."""
    cache = options.prefix_cache
    if cache is None:
        return None
    models = [model, *(() if draft is None else draft.models)]
    for module in models:
        check_resumable(module)
    empty = [Lane(module, sliding=options.sliding).caches for module in models]
    cache.bind(models, empty, options.shape)
    for member in members_of(draft):
        made = member.new_cache(0)
        if made is not None and (kept := made.kept()):
            return cache.bind_head(member.own_weights, kept[0], made.again)
    return None

"""What a generator is made with: every option checked once, and kept in one place."""

import weakref
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

from mlx_speculation.caches import PrefixCache
from mlx_speculation.engine.argument_checks import check_compiled, check_generator
from mlx_speculation.engine.distributed import RankedTarget, all_or_none
from mlx_speculation.engine.draft_length.policies import DraftLengthPolicies
from mlx_speculation.engine.drafters.reduced_vocabulary import (
    ReducedDrafts,
    checked_vocabulary,
)
from mlx_speculation.engine.drafters.sources import (
    Checked,
    check_draft_width,
    check_head_ids,
    checked_confidence,
    checked_draft,
    heads_of,
    models_of,
)
from mlx_speculation.engine.prompt import Prompts
from mlx_speculation.models import (
    CompiledForward,
    Group,
    Lane,
    ModelHooks,
    Sliding,
    TokenIds,
    check_causal,
    check_resumable,
    compiled_steps,
    evaluate_held,
    logit_width,
    wrapped,
)
from mlx_speculation.samplers import Acceptance


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, weakref_slot=True)
class GeneratorConfig:
    """What all streams of a generator share.

    When it is dropped, so are the recorders in its models: whatever runs keeps it.

    Attributes:
        model: the target.
        tokenizer: the target's, in mlx-lm's wrapper.
        ids: the token ids that the tokenizer knows.
        target_width: the logits of a row of the target.
        prompts: checks and encodes.
        ranked: the target on the ranks that it is spread over; None: it is whole.
        draft: what drafts, on this rank; None: plain decoding.
        draft_confidence: where a draft model stops.
        compiled: the compiled forwards of draft models, by the id of each.
        reduced: the output layers of drafts that know some token ids only.
        lengths: the draft lengths.
        acceptance: the rule.
        sliding: what stands for sliding windows in the caches made here.
        prefix_cache: what requests leave for later ones; None: nothing.
    """

    model: nn.Module
    tokenizer: Any
    ids: TokenIds
    target_width: int
    prompts: Prompts
    ranked: RankedTarget | None
    draft: Checked | None
    draft_confidence: float
    compiled: Mapping[int, CompiledForward]
    reduced: ReducedDrafts
    lengths: DraftLengthPolicies
    acceptance: Acceptance
    sliding: Sliding
    prefix_cache: PrefixCache | None

    @property
    def decides(self) -> bool:
        """Whether this rank drafts and decides, as the only one does too."""
        return self.ranked is None or self.ranked.leads

    def lane(
        self, model: nn.Module, caches: list[Any] | None = None, seen: int = 0
    ) -> Lane:
        """Return a lane of the target or of a draft model, with these options."""
        return Lane(model, caches, seen, sliding=self.sliding)


def checked_setup(
    model: nn.Module,
    tokenizer: Any,
    *,
    draft: Any,
    draft_length: int | None,
    draft_confidence: float,
    acceptance: Acceptance,
    sliding: Sliding,
    prefix_cache: PrefixCache | None,
    draft_vocabulary: Iterable[int] | None,
    compile_draft: bool,
    group: Group | None,
) -> GeneratorConfig:
    """Check what a generator is made with; see `SpeculativeGenerator`.

    Raises:
        InvalidRequestError: an argument is out of range or of the wrong kind.
        SpeculationError: whatever else the constructor of a generator names.
    """
    check_generator(model, acceptance, sliding)
    ranked = RankedTarget.of(model, group)
    with all_or_none(ranked):
        checked = checked_draft(draft, model)
        if draft is not None:
            check_causal(model)
        if ranked is not None:
            checked = ranked.own_draft(checked, prefix_cache)
            if not ranked.leads:
                draft_vocabulary = None
        check_compiled(compile_draft, models_of(checked), draft_vocabulary)
        confidence = checked_confidence(draft_confidence, checked)
        lengths = DraftLengthPolicies(
            model,
            checked,
            sliding,
            draft_length,
            compiled=compile_draft,
            early=not confidence,  # or the caller has said where they do
        )
        own = wrapped(tokenizer)
        ids, width = TokenIds.of(tokenizer), logit_width(model)
        highest_id = min(ids.width, width) - 1
        models = [model, *models_of(checked)]
        for module in models:
            Lane(module, sliding=sliding)  # refuses unknown caches, not in a stream
            check_draft_width(logit_width(module), highest_id)
        check_head_ids(checked, highest_id)
        reduced = ReducedDrafts(checked)
        if draft_vocabulary is not None:
            vocabulary = checked_vocabulary(draft_vocabulary, highest_id + 1)
            reduced = ReducedDrafts.make(checked, vocabulary)
        if prefix_cache is not None:
            _bind(prefix_cache, models, sliding)
        drafts = models_of(checked) if compile_draft else []
        with ExitStack() as hooks:
            for module in models:
                hooks.callback(ModelHooks(module).remove)
            setup = GeneratorConfig(
                model=model,
                tokenizer=own,
                ids=ids,
                target_width=width,
                prompts=Prompts(own, highest_id),
                ranked=ranked,
                draft=reduced.draft,
                draft_confidence=confidence,
                compiled={id(module): compiled_steps(module) for module in drafts},
                reduced=reduced,
                lengths=lengths,
                acceptance=acceptance,
                sliding=sliding,
                prefix_cache=prefix_cache,
            )
            # For streams in other threads; the checks have built their forwards by now.
            evaluate_held(*models, *heads_of(setup.draft))
            weakref.finalize(setup, hooks.pop_all().close)
    return setup


def _bind(cache: PrefixCache, models: list[nn.Module], sliding: Sliding) -> None:
    """Let a prefix cache belong to the target and the draft models."""
    for module in models:
        check_resumable(module)
    cache.bind(models, [Lane(module, sliding=sliding).caches for module in models])

"""Making a stream: its options checked, its lanes, its drafter and its decoder."""

import weakref
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any

import mlx.nn as nn

from mlx_speculation.engine.config import GeneratorConfig
from mlx_speculation.engine.detokenizer import TextDetokenizer
from mlx_speculation.engine.distributed import (
    digest_of,
    never_called,
    on_ranks,
    shown,
)
from mlx_speculation.engine.draft_length.base import DraftLengthPolicy, FixedDraftLength
from mlx_speculation.engine.draft_length.calibration import Calibration, Start
from mlx_speculation.engine.draft_length.cascade import CascadeDraftLength
from mlx_speculation.engine.drafters.base import Drafter, head_of, lanes_of, remember
from mlx_speculation.engine.drafters.cascade import CascadeDrafter, open_guarded
from mlx_speculation.engine.drafters.source import Draft, members_of
from mlx_speculation.engine.image_input import ImageInput, image_input
from mlx_speculation.engine.lookup.measured_draft import measured_draft
from mlx_speculation.engine.memory import Weights, held_memory
from mlx_speculation.engine.options import (
    GenerateOptions,
    check_constraint,
    check_counts,
    check_own_choice,
    check_rule,
    check_sampling,
    checked_stops,
)
from mlx_speculation.engine.prefix_reuse import PrefixReuse
from mlx_speculation.engine.prompt import Prompt, Sequence
from mlx_speculation.engine.round.decoder import Decoder
from mlx_speculation.engine.round.request import Request
from mlx_speculation.engine.round.tree_round import nodes_for
from mlx_speculation.engine.round.warmup import Shape, Warmup
from mlx_speculation.engine.stats import Statistics
from mlx_speculation.engine.stream import Stream
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import (
    Lane,
    TreeForward,
    checked_quantization,
    cuda_serves,
    stream_resources,
    wired,
)
from mlx_speculation.samplers import Chooser, Constrained, Sampling, Verifier
from mlx_speculation.samplers.constraints.masks import Masks


class StreamFactory:
    """Makes the streams of one generator."""

    def __init__(self, setup: GeneratorConfig) -> None:
        self._setup = setup
        self._weights = Weights(setup.model, _modules_of(setup.draft))
        self._busy: weakref.ref[Stream] | None = None
        self._rehearsed: set[Shape] = set()

    def start_calibration(self) -> Start:
        """Return what starts streams that measure: their texts are of no later use."""
        draft = measured_draft(self._setup.draft)
        maker = StreamFactory(replace(self._setup, draft=draft, prefix_cache=None))
        maker._busy = self._busy

        def start(prompt: list[int], lengths: DraftLengthPolicy) -> Stream:
            options = GenerateOptions(
                max_tokens=1 << 20, stop_tokens=(), draft_length=lengths
            )
            return maker.make(prompt, options)

        return start

    def make(self, prompt: Prompt, options: GenerateOptions) -> Stream:
        """Return a stream that has not begun; see `SpeculativeGenerator.stream`.

        Raises:
            InvalidRequestError: names the two values that do not fit.
            ConstraintError: the constraint fails before the first token.
        """
        check_sampling(options.sampling)
        setup, ranked = self._setup, self._setup.ranked
        session = None if ranked is None else ranked.next_stream(setup.draft)
        sampling = options.sampling or Sampling()
        if session is not None:
            sampling = session.with_seed(sampling)
        sampling = sampling.with_seed()
        check_counts(options.max_tokens, options.logprobs)
        images = image_input(setup.model, prompt, options)
        sequence, seen = setup.prompts.sequence(
            prompt if images is None else images.ids(setup.prompts.highest_id),
            options.prompt_cache,
            options.cached_tokens,
        )
        target = Lane(
            setup.model,
            options.prompt_cache,
            seen,
            sliding=setup.sliding,
            shape=setup.shape,
        )
        max_tokens = setup.prompts.fitting(sequence, options.max_tokens)
        target.prefill_step = options.prefill_step
        target.prefill_progress = options.prompt_progress
        target.quantization = checked_quantization(
            setup.model,
            options.kv_quantization,
            target.caches,
            sequence.start + len(sequence.tokens) + options.max_tokens,
        )
        if images is not None:
            images.enter(sequence, target)
        elif setup.tree:
            target.run = TreeForward(setup.model)
        statistics = Statistics()
        drafter = self._drafter(target, options.draft_cache, sequence, statistics)
        chooser = self._chooser(sampling)
        stops = checked_stops(options.stop)
        ends = self._end_ids(options.stop_tokens)
        masks = self._masks(options.constraint, ends)
        lengths = setup.lengths.for_stream(options.draft_length, options.max_draft)
        if isinstance(lengths, CascadeDraftLength) and isinstance(
            drafter, CascadeDrafter
        ):
            drafter.turns = lengths.turns
        verifier = Verifier(
            chooser,
            setup.acceptance,
            whole_rows=options.logprob_rows,
            rows=None if setup.shape is None else setup.shape.rows,
        )
        request = Request(
            target=target,
            sequence=sequence,
            verifier=verifier,
            drafter=drafter,
            policy=lengths,
            masks=masks,
            top=options.logprobs,
            explain=options.explain,
            statistics=statistics,
            warmup=self._warmup(target, lengths, statistics),
        )
        if setup.tree and images is None:
            request = replace(request, tree=nodes_for(request, setup.tree))
        running: AbstractContextManager[None] = wired(setup.model)
        if ranked is not None and session is not None:
            session.expect(self._fields(options, sequence, seen, sampling, stops, ends))
            request = on_ranks(request, session)
            running = ranked.running(session, target, running)
        assert sampling.seed is not None
        stream = Stream(
            decoder=Decoder(request),
            text=TextDetokenizer(setup.tokenizer, ends, stops),
            max_tokens=max_tokens,
            out_of_positions=max_tokens < options.max_tokens,
            seed=sampling.seed,
            hold_all=options.prompt_cache is not None,
            running=self._running(running),
            memory=partial(
                held_memory, self._weights, target, drafter, setup.prefix_cache
            ),
            prefixes=self._prefixes(options, target, drafter, lengths, images),
            remember=partial(remember, drafter),
            yielded_only=options.yielded_only,
            level_draft=options.level_draft,
            session=session,
        )
        if setup.draft is not None and not setup.draft.reusable:
            self._busy = weakref.ref(stream)
        return stream

    @contextmanager
    def _running(self, ranks: AbstractContextManager[None]) -> Iterator[None]:
        """Keep the setup, and with it the recorders, while a stream runs."""
        with ranks, ExitStack() as views:  # the ranks first: they learn of what fails
            for model in (self._setup.model, *self._setup.draft_models):
                views.enter_context(stream_resources(model))
            yield

    def _warmup(
        self, target: Lane, lengths: DraftLengthPolicy, statistics: Statistics
    ) -> Warmup | None:
        """Return what rehearses rounds, where shapes are dear and drafts adaptive."""
        fixed = isinstance(lengths, FixedDraftLength | Calibration)
        # Of ranks, of images, trees and exact mode other forwards would be needed.
        usual = self._setup.ranked is None and target.run is target.model
        if fixed or not usual or target.shape is not None or not cuda_serves():
            return None
        return Warmup(target, lengths.longest, statistics, self._rehearsed)

    def _chooser(self, sampling: Sampling) -> Chooser:
        """Return what chooses for the target; on a follower it is not asked."""
        setup = self._setup

        def make(options: Sampling) -> Chooser:
            ids, limit = setup.ids, setup.target_width
            return Chooser(options, ids.width, limit=limit, missing=ids.missing)

        chooser = make(sampling)
        check_rule(setup.acceptance, chooser)
        if setup.shape is not None:
            check_own_choice(sampling)
        return chooser if setup.decides else make(never_called(chooser))

    def _end_ids(self, stop_tokens: Collection[int] | None) -> frozenset[int]:
        """Return the ids that end the text."""
        own = self._setup.tokenizer.eos_token_ids
        ends = own if stop_tokens is None else stop_tokens
        return frozenset(int(token) for token in ends if token is not None)

    def _masks(self, constraint: Any, ends: Collection[int]) -> Masks | None:
        if constraint is None:
            return None
        check_constraint(constraint)
        usable = self._setup.ids.usable(self._setup.target_width)
        return Masks(Constrained(constraint, usable=usable, ends=ends))

    def _fields(
        self,
        options: GenerateOptions,
        sequence: Sequence,
        seen: int,
        sampling: Sampling,
        stops: tuple[str, ...],
        ends: frozenset[int],
    ) -> dict[str, Any]:
        """Return what has to be the same on all ranks, by the name of the option.

        A difference would let ranks run other rounds, and wait for each other for ever.
        What is rank 0's alone, such as its draft, is not among it.
        """
        setup, length = self._setup, options.draft_length
        found = {
            "the prompt": digest_of(sequence.tokens),
            "what the caches hold": f"{sequence.start + seen} tokens",
            "max_tokens": options.max_tokens,
            "stop": stops,
            "stop_tokens": sorted(ends),
            "draft_length": setup.lengths.usual if length is None else length,
            "max_draft": options.max_draft,
            "acceptance": setup.acceptance,
            "constraint": options.constraint,
            "prefill_step_size": options.prefill_step,
            "kv_quantization": options.kv_quantization,
            "yielded_only": options.yielded_only,
        }
        found |= {one.name: getattr(sampling, one.name) for one in fields(Sampling)}
        return {name: shown(value) for name, value in found.items()}

    def _prefixes(
        self,
        options: GenerateOptions,
        target: Lane,
        drafter: Drafter | None,
        lengths: DraftLengthPolicy,
        images: ImageInput | None,
    ) -> PrefixReuse | None:
        """Return a stream's view of the prefix cache, where it may use one."""
        cache = self._setup.prefix_cache
        if cache is None or options.own_caches:
            return None
        if target.quantization is not None:  # it holds rows as they were made
            return None
        if images is not None and images.forward.one_pass:  # from the middle it is not
            return None

        def lanes() -> list[Lane | None]:
            found: list[Lane | None] = [target, *lanes_of(drafter)]
            # A draft model's caches hold nothing of images.
            return found if images is None else [target, *[None] * (len(found) - 1)]

        model: Any = self._setup.model
        keys = () if images is None else images.prefix_keys(model)
        return PrefixReuse(
            cache,
            lanes,
            reach=lengths.longest + 2,
            keys=keys,
            head=partial(head_of, drafter),
            kept_head=self._setup.kept_head,
        )

    def _drafter(
        self,
        target: Lane,
        draft_cache: list[Any] | None,
        sequence: Sequence,
        statistics: Statistics,
    ) -> Drafter | None:
        """Return what drafts in one stream, as the draft is not used by another."""
        setup, source = self._setup, self._setup.draft
        if not setup.decides:
            return None
        models = len(setup.draft_models)
        if draft_cache is not None and models != 1:
            kind = "None" if source is None else f"of kind {source.kind!r}"
            raise InvalidRequestError(
                f"draft_cache was passed, and draft is {kind}, with {models} models "
                "instead of 1. Leave draft_cache out."
            )
        running = self._busy() if self._busy is not None else None
        if running is not None and not running.ended:
            raise InvalidRequestError(
                "The drafter serves 1 open stream, and a second one was asked for. "
                "Close the first, or pass a Draft, which opens a drafter for "
                "each stream."
            )
        if source is None:
            return None
        note = statistics.drafter_faults.append
        return open_guarded(source, target, sequence, draft_cache, note)


def _modules_of(draft: Draft | None) -> list[nn.Module]:
    """Return the modules of a draft, without what it shares with the target."""
    found = [
        one
        for each in members_of(draft)
        for one in (each.own_weights, each.reduced_rows)
    ]
    return [module for module in found if module is not None]

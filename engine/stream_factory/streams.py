"""Factory of streams: checks the options, and puts the parts of a stream together."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields, replace
from functools import cached_property, partial
from hashlib import sha256
from typing import Any

import mlx.nn as nn

from mlx_speculation.blas import text_threads
from mlx_speculation.engine.config import GeneratorConfig
from mlx_speculation.engine.detokenizer import ChunkQueue, TextDetokenizer
from mlx_speculation.engine.distributed import RankSession, on_ranks
from mlx_speculation.engine.draft_length.base import DraftLengthPolicy
from mlx_speculation.engine.drafters.draft import Draft, members_of
from mlx_speculation.engine.lookup.drafter import measured_draft
from mlx_speculation.engine.memory import (
    CacheSize,
    WeightBytes,
    check_prompt,
    held_memory,
    weight_bytes,
)
from mlx_speculation.engine.options import StreamOptions
from mlx_speculation.engine.prefix_reuse import PrefixReuse
from mlx_speculation.engine.prompt import Prompt, Sequence
from mlx_speculation.engine.round.decoder import StreamDecoder
from mlx_speculation.engine.round.final_caches import FinalCaches
from mlx_speculation.engine.round.request import Request
from mlx_speculation.engine.stream import Generation, Stream
from mlx_speculation.engine.stream_factory.image_input import ImageInput, image_input
from mlx_speculation.engine.stream_factory.requests import RequestFactory
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import (
    Lane,
    TreeForward,
    wired,
)
from mlx_speculation.samplers import Sampling

# Options whose values all ranks compare as they are; `_fields` adds other values.
_ON_ALL_RANKS = (
    "max_tokens",
    "max_draft",
    "constraint",
    "kv_quantization",
    "yielded_only",
)


class StreamFactory:
    """Makes the streams of one generator."""

    def __init__(self, setup: GeneratorConfig) -> None:
        self._setup = setup
        self._requests = RequestFactory(setup)
        self._busy: weakref.ref[Stream] | None = None

    def start_calibration(
        self,
    ) -> Callable[[list[int], DraftLengthPolicy], Stream]:
        """Return a function that starts streams without prefix cache, for measuring."""
        draft = measured_draft(self._setup.draft)
        options = replace(self._setup.options, prefix_cache=None)
        maker = StreamFactory(replace(self._setup, draft=draft, options=options))
        maker._busy = self._busy

        def start(prompt: list[int], lengths: DraftLengthPolicy) -> Stream:
            options = StreamOptions(
                max_tokens=1 << 20, stop_tokens=(), draft_length=lengths
            )
            return maker.make(prompt, options)

        return start

    def make(self, prompt: Prompt, options: StreamOptions) -> Stream:
        """Return a stream that has not begun; see `SpeculativeGenerator.stream`."""
        setup, ranked = self._setup, self._setup.ranked
        session = None if ranked is None else ranked.next_stream(setup.draft)
        sampling = options.sampling or Sampling()
        if session is not None:
            sampling = session.with_seed(sampling)
        options = replace(options, sampling=sampling.with_seed())
        images = image_input(setup.model, prompt, options)
        sequence, seen = setup.prompts.sequence(
            prompt if images is None else images.ids(setup.prompts.highest_id),
            options.prompt_cache,
            options.cached_tokens,
        )
        if options.prediction is not None:
            self._check_prediction()
            sequence.prediction = setup.prompts.prediction(options.prediction)
        if ranked is None and images is None and not options.own_caches:
            check_prompt(self._sizes, len(sequence.tokens), setup.options.prefix_cache)
        target = self._requests.lane(options, sequence, seen)
        if images is not None:
            images.enter(sequence, target)
        elif setup.options.tree:
            target.run = TreeForward(setup.model)
        self._check_free()
        request = self._requests.make(options, sequence, target, images)
        running: AbstractContextManager[None] = wired(setup.model)
        if ranked is not None and session is not None:
            session.fields |= self._fields(options, sequence, seen)
            request = on_ranks(request, session)
            running = ranked.running(session, target, running)
        stream = self._stream(options, request, running, session, images)
        if setup.draft is not None and not setup.draft.reusable:
            self._busy = weakref.ref(stream)
        return stream

    @cached_property
    def _weights(self) -> WeightBytes:
        return weight_bytes(self._setup.model, _modules_of(self._setup.draft))

    @cached_property
    def _sizes(self) -> list[CacheSize]:
        """The cache sizes of the target, of draft models and of heads."""
        setup = self._setup
        sizes = [CacheSize.of(each) for each in (setup.model, *setup.draft_models)]
        heads = sum(member.follows for member in members_of(setup.draft))
        return [*sizes, *[CacheSize(row=sizes[0].layer)] * heads]

    def _check_prediction(self) -> None:
        """Refuse a prediction without a lookup to search it (on rank 0 only)."""
        setup = self._setup
        if setup.decides and not any(each.free for each in members_of(setup.draft)):
            kind = "None" if setup.draft is None else f"of kind {setup.draft.kind!r}"
            raise InvalidRequestError(
                f"prediction was passed, but draft is {kind}, without a lookup that "
                "uses it. Pass draft='lookup', or CascadeDraft(LookupDraft(), ...)."
            )

    def _check_free(self) -> None:
        """Refuse a second open stream of a drafter that drafts for one at a time."""
        running = self._busy() if self._busy is not None else None
        if self._setup.decides and running is not None and not running.ended:
            raise InvalidRequestError(
                "The drafter serves 1 stream at a time, and another one is open. Close "
                "that one, or pass a Draft, which opens a drafter for each stream."
            )

    def _stream(
        self,
        options: StreamOptions,
        request: Request,
        running: AbstractContextManager[None],
        session: RankSession | None,
        images: ImageInput | None,
    ) -> Stream:
        setup, drafter = self._setup, request.open_drafter
        max_tokens = setup.prompts.fitting(request.sequence, options.max_tokens)
        assert options.sampling is not None
        assert options.sampling.seed is not None
        decoder, ends = StreamDecoder(request), self._requests.end_ids(options)
        text = TextDetokenizer(setup.tokenizer, ends, options.stops)
        return Stream(
            Generation(
                decoder=decoder,
                chunks=ChunkQueue(text, max_tokens),
                caches=FinalCaches(
                    decoder.rounds,
                    hold_all=options.prompt_cache is not None,
                    yielded_only=options.yielded_only,
                    level_draft=options.level_draft,
                ),
                out_of_positions=max_tokens < options.max_tokens,
                seed=options.sampling.seed,
                running=self._running(running),
                memory=lambda: held_memory(
                    self._weights,
                    request.target,
                    drafter.lanes,
                    drafter.held,
                    setup.options.prefix_cache,
                ),
                prefixes=self._prefixes(options, request, images),
                remember=partial(drafter.remember, answer=len(request.sequence.tokens)),
                session=session,
            )
        )

    @contextmanager
    def _running(self, ranks: AbstractContextManager[None]) -> Iterator[None]:
        """Enter the resources of a running stream.

        Until they are exited, this generator keeps `self` and so the setup's hooks.
        """
        exact = self._setup.options.shape is not None
        # `ranks` is outermost, so that other ranks learn of any failure.
        with ranks, text_threads(exact=exact):
            yield

    def _fields(
        self, options: StreamOptions, sequence: Sequence, seen: int
    ) -> dict[str, Any]:
        """Return the values that have to agree on all ranks, by name of option."""
        setup, length = self._setup, options.draft_length
        digest = sha256(",".join(map(str, sequence.tokens)).encode())
        values: dict[str, Any] = {
            "the prompt": f"{len(sequence.tokens)} tokens ({digest.hexdigest()[:16]})",
            "what the caches hold": f"{sequence.start + seen} tokens",
            "stop": options.stops,
            "stop_tokens": sorted(self._requests.end_ids(options)),
            "draft_length": setup.lengths.usual if length is None else length,
            "acceptance": setup.options.acceptance,
            "prefill_step_size": options.prefill_step,
        }
        values |= {name: getattr(options, name) for name in _ON_ALL_RANKS}
        for one in fields(Sampling):
            values[one.name] = getattr(options.sampling, one.name)
        return values

    def _prefixes(
        self,
        options: StreamOptions,
        request: Request,
        images: ImageInput | None,
    ) -> PrefixReuse | None:
        """Return a stream's view of the prefix cache; None: the stream uses none."""
        cache = self._setup.options.prefix_cache
        target, drafter = request.target, request.open_drafter
        if cache is None or options.own_caches:
            return None
        if target.quantization is not None:  # the prefix cache holds no quantized rows
            return None
        if images is not None and images.forward.one_pass:  # prompts are read whole
            return None

        def lanes() -> list[Lane | None]:
            result: list[Lane | None] = [target, *drafter.lanes]
            # A draft model reads no images, so its caches are not used.
            return result if images is None else [target, *[None] * (len(result) - 1)]

        model: Any = self._setup.model
        keys = () if images is None else images.prefix_keys(model)
        return PrefixReuse(
            cache,
            lanes,
            reach=request.policy.longest + 2,
            keys=keys,
            head=lambda: None if drafter.disabled else drafter.prefix_head,
            kept_head=self._setup.kept_head,
            ends=self._setup.tokenizer.eos_token_ids,
        )


def _modules_of(draft: Draft | None) -> list[nn.Module]:
    """Return the modules of a draft, without weights that it shares with the target."""
    result = [
        one
        for each in members_of(draft)
        for one in (each.own_weights, each.reduced_rows)
    ]
    return [module for module in result if module is not None]

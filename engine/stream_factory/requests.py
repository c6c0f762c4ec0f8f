"""The factory of requests: lane, verifier, drafter and constraint of a stream."""

from dataclasses import replace

from mlx_speculation.engine.config import GeneratorConfig
from mlx_speculation.engine.distributed import (
    never_called,
)
from mlx_speculation.engine.draft_length.base import DraftLengthPolicy, FixedDraftLength
from mlx_speculation.engine.draft_length.calibration import Calibration
from mlx_speculation.engine.draft_length.ruled import RuledDrafter, RuleDraftLength
from mlx_speculation.engine.drafters.base import OpenDrafter
from mlx_speculation.engine.drafters.cascade import CascadeDrafter, open_guarded
from mlx_speculation.engine.options import StreamOptions
from mlx_speculation.engine.options.stream import check_own_choice, check_rule
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.engine.round.request import Request
from mlx_speculation.engine.round.tree_round import nodes_for
from mlx_speculation.engine.round.warmup import Shape, Warmup
from mlx_speculation.engine.stats import Statistics
from mlx_speculation.engine.stream_factory.image_input import ImageInput
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import (
    Lane,
    checked_quantization,
    cuda_serves,
)
from mlx_speculation.samplers import Chooser, Constrained, Sampling, Verifier
from mlx_speculation.samplers.constraints.masks import Masks


class RequestFactory:
    """Makes the requests of one generator's streams."""

    def __init__(self, setup: GeneratorConfig) -> None:
        self._setup = setup
        self._rehearsed: set[Shape] = set()

    def lane(self, options: StreamOptions, sequence: Sequence, seen: int) -> Lane:
        """Return the target's lane; its caches hold the first `seen` known tokens."""
        setup = self._setup
        target = Lane(
            setup.model,
            options.prompt_cache,
            seen,
            sliding=setup.options.sliding,
            shape=setup.options.shape,
        )
        target.part = setup.lengths.part
        target.prefill_step = options.prefill_step
        target.prefill_progress = options.prompt_progress
        target.quantization = checked_quantization(
            setup.model,
            options.kv_quantization,
            target.caches,
            sequence.start + len(sequence.tokens) + options.max_tokens,
        )
        return target

    def make(
        self,
        options: StreamOptions,
        sequence: Sequence,
        target: Lane,
        images: ImageInput | None,
    ) -> Request:
        """Return the request of a stream."""
        setup, statistics = self._setup, Statistics()
        length, most = options.draft_length, options.max_draft
        predicted = bool(sequence.prediction)
        lengths = setup.lengths.for_stream(length, most, predicted=predicted)
        drafter = self._drafter(options, sequence, target, lengths, statistics)
        verifier = self._verifier(options)
        request = Request(
            target=target,
            sequence=sequence,
            verifier=verifier,
            drafter=drafter,
            policy=lengths,
            masks=self._masks(options),
            top=options.logprobs,
            explain=options.explain,
            statistics=statistics,
            warmup=self._warmup(target, lengths, statistics),
        )
        if setup.options.tree and images is None:
            request = replace(request, tree=nodes_for(request, setup.options.tree))
        return request

    def end_ids(self, options: StreamOptions) -> frozenset[int]:
        """Return the ids that end the text."""
        ends = options.stop_tokens
        if ends is None:
            ends = self._setup.tokenizer.eos_token_ids
        return frozenset(int(token) for token in ends if token is not None)

    def _warmup(
        self, target: Lane, lengths: DraftLengthPolicy, statistics: Statistics
    ) -> Warmup | None:
        """Return a warm-up of round shapes; None: the shapes need no rehearsal."""
        fixed = isinstance(lengths, FixedDraftLength | Calibration)
        # A warm-up rehearses no forwards on ranks, in exact mode (`shape`), or over
        # images or trees, which replace `target.run`.
        usual = self._setup.ranked is None and target.run is target.model
        if fixed or not usual or target.shape is not None or not cuda_serves():
            return None
        return Warmup(target, lengths.longest, statistics, self._rehearsed)

    def _verifier(self, options: StreamOptions) -> Verifier:
        """Return the verifier of a stream; on ranks other than 0 it is not called."""
        setup, sampling = self._setup, options.sampling or Sampling()

        def make(options: Sampling) -> Chooser:
            ids, limit = setup.ids, setup.target_width
            return Chooser(options, ids.width, limit=limit, missing=ids.missing)

        chooser = make(sampling)
        check_rule(setup.options.acceptance, chooser)
        if setup.options.shape is not None:
            check_own_choice(sampling)
        return Verifier(
            chooser if setup.decides else make(never_called(chooser)),
            setup.options.acceptance,
            whole_rows=options.logprob_rows,
            rows=None if setup.options.shape is None else setup.options.shape.rows,
        )

    def _masks(self, options: StreamOptions) -> Masks | None:
        """Return the masks of the constraint."""
        if options.constraint is None:
            return None
        usable = self._setup.ids.usable(self._setup.target_width)
        ends = self.end_ids(options)
        return Masks(Constrained(options.constraint, usable=usable, ends=ends))

    def _drafter(
        self,
        options: StreamOptions,
        sequence: Sequence,
        target: Lane,
        lengths: DraftLengthPolicy,
        statistics: Statistics,
    ) -> OpenDrafter | None:
        """Return a stream's new drafter; None: no draft, or a rank other than 0."""
        setup, draft = self._setup, self._setup.draft
        draft_cache = options.draft_cache
        if not setup.decides:
            return None
        models = len(setup.draft_models)
        if draft_cache is not None and models != 1:
            kind = "None" if draft is None else f"of kind {draft.kind!r}"
            raise InvalidRequestError(
                f"draft_cache needs a draft with 1 model, but draft is {kind}, with "
                f"{models} models. Leave draft_cache out."
            )
        if draft is None:
            return None
        note = statistics.drafter_faults.append
        drafters = open_guarded(draft, target, sequence, draft_cache, note)
        if isinstance(lengths, RuleDraftLength):
            lengths.forecast = lambda limit: [
                each.forecast(sequence, limit) for each in drafters
            ]
            if lengths.late:
                return RuledDrafter(drafters, lengths, target)
        return drafters[0] if len(drafters) == 1 else CascadeDrafter(*drafters)

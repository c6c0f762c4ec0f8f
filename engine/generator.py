"""The front door: a target, perhaps a draft, and streams of text from them."""

import copy
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import mlx.nn as nn

from mlx_speculation.caches import PrefixCache
from mlx_speculation.engine.batch_requests import generate_batch
from mlx_speculation.engine.checks import (
    check_constraint,
    check_counts,
    check_generator,
    check_rule,
    checked_stops,
)
from mlx_speculation.engine.decoding import Decoder
from mlx_speculation.engine.draft_model import DraftModel
from mlx_speculation.engine.drafting import Drafter
from mlx_speculation.engine.drafts import (
    check_draft_width,
    check_head_ids,
    checked_confidence,
    checked_draft,
    drafter_of_stream,
    lanes_of,
    make_draft_model,
    models_of,
    remember,
    serves_one_stream,
)
from mlx_speculation.engine.following import Following
from mlx_speculation.engine.handling import USUAL, Handling
from mlx_speculation.engine.lengths import Lengths
from mlx_speculation.engine.masking import Masks
from mlx_speculation.engine.measured_lengths import (
    CostTable,
    MeasuredLengths,
    Progress,
    follow_calibration,
    measured_draft,
)
from mlx_speculation.engine.memory import held_memory
from mlx_speculation.engine.pairs import load_pair
from mlx_speculation.engine.prefixes import Prefixes
from mlx_speculation.engine.prompts import Prompts
from mlx_speculation.engine.rank_fields import fields_of_stream
from mlx_speculation.engine.ranked_stream import RankedStream
from mlx_speculation.engine.ranked_target import RankedTarget, all_or_none
from mlx_speculation.engine.results import Result
from mlx_speculation.engine.round_parts import PartsTable
from mlx_speculation.engine.sequence import Sequence
from mlx_speculation.engine.statistics import Statistics
from mlx_speculation.engine.stream import Stream
from mlx_speculation.engine.text import TextStream
from mlx_speculation.engine.told_rounds import Deciders
from mlx_speculation.engine.vocabulary import ReducedDrafts, checked_vocabulary
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import (
    Contract,
    Group,
    Lane,
    Parallel,
    Recorders,
    Sliding,
    TokenIds,
    check_causal,
    check_resumable,
    logit_width,
    notice,
    wired,
    wrapped,
)
from mlx_speculation.samplers import (
    Acceptance,
    Chooser,
    Constrained,
    Constraint,
    Sampling,
    Verifier,
)


class SpeculativeGenerator:
    """Generates text with an mlx-lm model, faster where a draft helps.

    The text is that of plain decoding: with temperature 0, and with a seed above it,
    whatever the draft and its length.

        generator = SpeculativeGenerator(model, tokenizer, draft=small_model)
        print(generator.generate("def fib(n):", max_tokens=64).text)

    Streams of one generator are independent of each other, unless `draft` is a
    drafter object of your own: that serves one open stream at a time.

    A drafter that fails is set aside for the rest of the stream, and the text goes on
    as it would have: `stats.drafter_faults` says how it failed, and so does a
    `DrafterFaultWarning`.

    Args:
        model: an mlx-lm model.
        tokenizer: its tokenizer, mlx-lm's wrapper or a Hugging Face one.
        draft: an mlx-lm model with the same token ids, "lookup" or a `LookupDrafter`,
            an `MtpDraft`, `EagleDraft` or `DFlashDraft`, a `Cascade`, a `Drafter` of
            your own, or None for plain decoding.
        draft_length: tokens drafted in a round; 0 is plain decoding. None: as many as
            pay, by what rounds cost here and what is accepted, see `calibrate`. The
            timing of rounds then decides where drafts end: with `acceptance="keyed"`
            that changes nothing else, with the other rules the text of a seed.
        draft_confidence: a draft model stops before a token where the product of its
            largest probabilities falls below this; 0: never. See `DraftModel`.
        acceptance: "keyed", the rule under which the draft cannot change the text of
            a seed; "rejection" and "block" keep the law of the text, but not the text,
            and accept more where tokens are drawn by chance.
        sliding: what stands for sliding windows in the caches made here: "slack", the
            faster `SlidingKVCache`, or "native", mlx-lm's `RotatingKVCache`, which
            adds up one-row steps in another order. A passed `prompt_cache` stays as
            it is; `mlx_speculation.caches.with_slack` and `as_native` convert one.
        prefix_cache: keeps what requests leave in the caches, for later ones that
            begin alike; a `PrefixCache` of this target and draft only. Requests with
            a `prompt_cache` of their own pass it by.
        draft_vocabulary: token ids that a draft model or an MTP head drafts from, see
            `reduced_vocabulary`; the text may hold every other one. None: all.
        group: the ranks of `mx.distributed` that the target is spread over; every
            rank makes the generator and the streams, with the same options, and gets
            the same chunks. Rank 0 drafts and decides; the drafts of others are not
            used. None: the target is whole.

    Raises:
        InvalidRequestError: an argument is out of range or of the wrong kind.
        UnsupportedCacheError: the model's caches are of an unknown kind.
        UnsupportedModelError: the target cannot be decoded on several ranks.
        RankMismatchError: the ranks run other versions.
        RankLostError: rank 0 cannot be reached by another rank.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        draft: nn.Module | Drafter | Following | str | None = None,
        draft_length: int | None = None,
        draft_confidence: float = 0.0,
        acceptance: Acceptance = "keyed",
        sliding: Sliding = "slack",
        prefix_cache: PrefixCache | None = None,
        draft_vocabulary: Iterable[int] | None = None,
        group: Group | None = None,
    ) -> None:
        check_generator(model, acceptance, sliding)
        self._acceptance = acceptance
        self._sliding = sliding
        self._notices: tuple[str, ...] = ()
        self._busy: weakref.ref[Stream] | None = None
        self._ranked = RankedTarget.of(model, group)
        with all_or_none(self._ranked):
            self._draft = checked_draft(draft, model)
            if draft is not None:
                check_causal(model)
            if self._ranked is not None:
                self._draft = self._ranked.own_draft(self._draft, prefix_cache)
                if not self._ranked.decides:
                    draft_vocabulary = None
            self._lengths = MeasuredLengths(model, self._draft, sliding, draft_length)
            self._draft_confidence = checked_confidence(draft_confidence, self._draft)
            self._model, self._tokenizer = model, wrapped(tokenizer)
            self._ids = TokenIds.of(tokenizer)
            self._target_width = logit_width(model)
            highest_id = min(self._ids.width, self._target_width) - 1
            self._prompts = Prompts(self._tokenizer, highest_id)
            models = [model, *models_of(self._draft)]
            for module in models:
                self._lane(module)  # refuses unknown caches now, not in a stream
                check_draft_width(logit_width(module), highest_id)
            check_head_ids(self._draft, highest_id)
            self._reduced = ReducedDrafts(self._draft)
            if draft_vocabulary is not None:
                vocabulary = checked_vocabulary(draft_vocabulary, highest_id + 1)
                self._reduced = ReducedDrafts.make(self._draft, vocabulary)
                self._draft = self._reduced.draft
            if prefix_cache is not None:
                for module in models:
                    check_resumable(module)
                prefix_cache.bind(
                    models, [self._lane(module).caches for module in models]
                )
            self._prefix_cache = prefix_cache
            for module in models:
                weakref.finalize(self, Recorders(module).remove)

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo: str | Path,
        *,
        draft: str | Path | nn.Module | Drafter | Following | None = None,
        draft_length: int | None = None,
        draft_confidence: float = 0.0,
        acceptance: Acceptance = "keyed",
        sliding: Sliding = "slack",
        prefix_cache: PrefixCache | None = None,
        contract: Contract | None = None,
        quantize_draft: int | None = None,
        draft_vocabulary: Iterable[int] | None = None,
        adapter_path: str | Path | None = None,
        trust_remote_code: bool = False,
        group: Group | None = None,
        parallel: Parallel = "tensor",
    ) -> "SpeculativeGenerator":
        """Load a target, and a draft model where `draft` names one.

        Args:
            path_or_repo: a folder in mlx-lm's layout, or the name of a repository.
            draft: likewise, "mtp" for the target's own head, "auto" for what its
                folder offers, or anything that the constructor takes. "auto" takes
                what speculation.json in the folder names, else the head in it, else a
                lookup, with a `DraftNotice` that says why; `notices` has it too.
            draft_length: see the constructor.
            draft_confidence: see the constructor.
            acceptance: see the constructor.
            sliding: see the constructor.
            prefix_cache: see the constructor.
            contract: what the head was trained with; a probe finds it when omitted.
            quantize_draft: bits in which to hold the weights of the draft or head that
                is loaded, 2, 3, 4, 5, 6 or 8; those of the target stay as they are.
            draft_vocabulary: see the constructor.
            adapter_path: a folder of adapter weights for the target, as mlx_lm.lora
                writes them.
            trust_remote_code: let code in the folders of target and draft model run.
            group: spread the target over its ranks, see the constructor. A draft
                model is read on rank 0 alone.
            parallel: how it is spread: "tensor" or "pipeline".

        Raises:
            ModelFolderError: a folder is not a model, or has no whole head, or its
                speculation.json is wrong.
            ContractError: the head agrees with the target by no convention.
            UnsupportedModelError: the target is of no family whose heads are known.
            TokenizerMismatchError: target and draft do not share their token ids.
        """
        model, tokenizer, choice = load_pair(
            path_or_repo,
            draft,
            contract=contract,
            quantize_draft=quantize_draft,
            adapter_path=adapter_path,
            trust_remote_code=trust_remote_code,
            group=group,
            parallel=parallel,
        )
        made = cls(
            model,
            tokenizer,
            draft=choice.draft,
            draft_length=choice.length if draft_length is None else draft_length,
            draft_confidence=draft_confidence,
            acceptance=acceptance,
            sliding=sliding,
            prefix_cache=prefix_cache,
            draft_vocabulary=draft_vocabulary,
            group=group,
        )
        made._notices = choice.notices
        for said in choice.notices:
            notice(said)
        return made

    @property
    def notices(self) -> tuple[str, ...]:
        """Why the draft is not the one that was wished for; empty if it is."""
        return self._notices

    @property
    def model(self) -> nn.Module:
        """The target."""
        return self._model

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer, in mlx-lm's wrapper."""
        return self._tokenizer

    @property
    def ranks(self) -> int:
        """How many ranks the target is spread over; 1: it is whole."""
        return 1 if self._ranked is None else self._ranked.ranks.size

    @property
    def draft_length(self) -> int | None:
        """The tokens drafted in a round; None: as many as pay, by measurement."""
        return self._lengths.usual

    def encode(self, prompt: str | Iterable[int]) -> list[int]:
        """Return a prompt's token ids: text encoded as mlx-lm does, or ids checked.

        Raises:
            InvalidRequestError: there is no token, or one that the target lacks.
        """
        return self._prompts.encode(prompt)

    @property
    def lengths(self) -> MeasuredLengths:
        """What decides draft lengths, for `BatchGenerator`."""
        return self._lengths

    @property
    def round_parts(self) -> PartsTable:
        """Where the time of the rounds of `calibrate` went, medians of each part.

        By context bucket and draft length, see `engine.round_clock`; empty without a
        calibration on this machine. They are for people: costs of whole rounds decide.
        """
        return self._lengths.parts

    def calibrate(
        self,
        contexts: SequenceOf[int] = (64,),
        *,
        progress: Progress | None = None,
    ) -> CostTable:
        """Measure what rounds cost here, by draft length, and keep it in a file.

        It measures whole rounds: plain steps, and drafting, the head's refresh and the
        verify together for each length up to 8 and every fourth beyond; `round_parts`
        has the parts. It takes 54 rounds for each context with lengths up to 8, and 66
        up to a lookup's 16; more, and 300 at most, where the draft is shorter than it
        was asked for. Without it the first stream measures what it needs in its own
        rounds, at the price of some speed.

        Args:
            contexts: numbers of tokens in the caches to measure at. Costs between 512,
                1,024, 2,048 ... tokens are taken for equal, and those of a context
                that was never met for those of the nearest.
            progress: called with the number of measured rounds, and of all.

        Returns:
            Seconds of a round by context bucket (0: up to 512 tokens, 1: up to 1,024)
            and draft length; nothing on ranks that only follow rank 0.

        Raises:
            InvalidRequestError: there is no draft, or a context is not at least 1.
        """
        # What it generates is of no use to later requests.
        generator = copy.copy(self)
        generator._prefix_cache = None
        generator._draft = measured_draft(self._draft)

        def start(prompt: list[int], lengths: Lengths) -> Stream:
            return generator.stream(
                prompt, max_tokens=1 << 20, stop_tokens=(), draft_length=lengths
            )

        if self._ranked is not None and not self._ranked.decides:
            return follow_calibration(start, contexts)
        return self._lengths.calibrate(start, contexts, progress)

    def generate(self, prompt: str | SequenceOf[int], **options: Any) -> Result:
        """Generate to the end; takes what `stream` takes."""
        stream = self.stream(prompt, **options)
        for _ in stream:
            pass
        return stream.result

    def generate_batch(
        self,
        prompts: SequenceOf[str | SequenceOf[int]],
        *,
        max_rows: int = 32,
        **options: Any,
    ) -> list[Result]:
        """Generate the text of each prompt, many of them at once.

        Each text is that of the prompt alone with its options and seed, see
        `BatchGenerator`.

        Args:
            prompts: texts or lists of token ids.
            max_rows: how many run at once.
            options: what `stream` takes. A list has one value for each prompt;
                anything else is for all. Where one `sampling` with a seed is for all,
                prompt i is sampled with `derived_seed(seed, i)`.

        Returns:
            The results, in the order of the prompts.

        Raises:
            InvalidRequestError: names the two values that do not fit; nothing has run.
            Exception: what ended the first row that failed, when all have ended.
        """
        return generate_batch(self, prompts, max_rows, options)

    def stream(
        self,
        prompt: str | SequenceOf[int],
        *,
        max_tokens: int = 256,
        sampling: Sampling | None = None,
        stop: str | SequenceOf[str] = (),
        stop_tokens: Collection[int] | None = None,
        draft_length: int | Lengths | None = None,
        prompt_cache: list[Any] | None = None,
        cached_tokens: Iterable[int] | None = None,
        draft_cache: list[Any] | None = None,
        logprobs: int | None = None,
        constraint: Constraint | None = None,
        explain: bool = False,
        handling: Handling = USUAL,
    ) -> Stream:
        """Start a generation; nothing runs before the first chunk is asked for.

        Args:
            prompt: text, encoded as mlx-lm does, or token ids.
            max_tokens: how many tokens to generate at most, 0 or more.
            sampling: how tokens are chosen; greedy when omitted.
            stop: texts that end the generation; the text is cut before them.
            stop_tokens: ids that end it; the tokenizer's own when omitted.
            draft_length: overrides the generator's; a `Lengths` of your own is asked
                before each round.
            prompt_cache: the caller's mlx-lm caches of the target; `prompt` follows
                what they hold. They are written to.
            cached_tokens: the ids that `prompt_cache` holds. Without it the caches'
                offset is the position, or 0 where no cache has one (models of
                recurrent layers only); seeds and drafts then know less of the text.
            draft_cache: caches of the draft model that hold `cached_tokens`, or the
                beginning of them.
            logprobs: let every chunk say how probable its token was, and so many of
                the most probable ones; 0: the token alone; None: nothing.
            constraint: what the generated text has to follow, such as
                `json_schema(...)`. The text fits it where it ends with "stop", unless
                a stop string has cut it. Stop tokens come where it may end, and where
                nothing else may come it ends without one.
            explain: keep each round's draft length, what it was chosen by, and the
                parts of its time, in `stream.decisions`. The parts are exact then, and
                rounds some 1 % slower, see `engine.round_clock`.
            handling: how the prompt is read and the caches are kept.

        Raises:
            InvalidRequestError: names the two values that do not fit.
            ConstraintError: the constraint fails before the first token.
        """
        together = None
        if self._ranked is not None:
            together = self._ranked.next_stream(self._draft)
            sampling = together.with_seed(sampling)
        sampling = (sampling or Sampling()).with_seed()
        check_counts(max_tokens, logprobs)
        sequence, seen = self._prompts.sequence(prompt, prompt_cache, cached_tokens)
        target = self._lane(self._model, prompt_cache, seen)
        handling.prepare(target)
        statistics = Statistics()
        drafter = self._drafter(target, draft_cache, sequence, statistics)
        chooser = Chooser(
            sampling,
            self._ids.width,
            limit=self._target_width,
            missing=self._ids.missing,
        )
        check_rule(self._acceptance, chooser)
        stops = checked_stops(stop)
        ends = self._tokenizer.eos_token_ids if stop_tokens is None else stop_tokens
        end_ids = frozenset(int(token) for token in ends if token is not None)
        masks = None if constraint is None else self._masks(constraint, end_ids)
        assert sampling.seed is not None
        lengths = self._lengths.for_stream(draft_length)
        verifier = Verifier(chooser, self._acceptance, whole_rows=handling.whole_rows)
        deciders = Deciders(drafter, lengths, verifier)
        own_caches = prompt_cache is not None or draft_cache is not None
        make: Callable[..., Stream] = Stream
        running = self._running()
        if self._ranked is not None and together is not None:
            together.expect(
                fields_of_stream(
                    sequence,
                    seen,
                    sampling,
                    max_tokens=max_tokens,
                    stops=stops,
                    ends=end_ids,
                    draft_length=(
                        self.draft_length if draft_length is None else draft_length
                    ),
                    acceptance=self._acceptance,
                    constraint=constraint,
                    handling=handling,
                )
            )
            deciders = deciders.on_ranks(together)
            make = partial(RankedStream, together)
            running = self._ranked.running(together, target, running)
        stream = make(
            decoder=Decoder(
                target=target,
                sequence=sequence,
                verifier=deciders.verifier,
                drafter=deciders.drafter,
                lengths=deciders.lengths,
                explain=explain,
                top=logprobs,
                masks=masks,
                statistics=statistics,
            ),
            sequence=sequence,
            text=TextStream(self._tokenizer.detokenizer, end_ids, stops),
            max_tokens=max_tokens,
            seed=sampling.seed,
            hold_all=prompt_cache is not None,
            running=running,
            memory=partial(
                held_memory,
                self._model,
                self._draft,
                target,
                drafter,
                self._prefix_cache,
                self._reduced.modules,
            ),
            prefixes=None if own_caches else self._prefixes(target, drafter, lengths),
            remember=partial(remember, drafter),
            yielded_only=handling.yielded_only,
            level_draft=handling.level_draft,
        )
        if serves_one_stream(self._draft):
            self._busy = weakref.ref(stream)
        return stream

    def _masks(self, constraint: Any, ends: Collection[int]) -> Masks:
        check_constraint(constraint)
        usable = self._ids.usable(self._target_width)
        return Masks(Constrained(constraint, usable=usable, ends=ends))

    def _prefixes(
        self, target: Lane, drafter: Drafter | None, lengths: Lengths
    ) -> Prefixes | None:
        """Return a stream's view of the prefix cache, if there is one."""
        if self._prefix_cache is None:
            return None

        def lanes() -> list[Lane | None]:
            return [target, *lanes_of(drafter)]

        return Prefixes(self._prefix_cache, lanes, reach=lengths.longest + 2)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Keep this generator, and with it the recorders, while a stream runs."""
        with wired(self._model):
            yield

    def _lane(
        self, model: nn.Module, caches: list[Any] | None = None, seen: int = 0
    ) -> Lane:
        return Lane(model, caches, seen, sliding=self._sliding)

    def _drafter(
        self,
        target: Lane,
        draft_cache: list[Any] | None,
        sequence: Sequence,
        statistics: Statistics,
    ) -> Drafter | None:
        draft = self._draft
        models = len(models_of(draft))
        if self._ranked is not None and not self._ranked.decides:
            return None
        if draft_cache is not None and models != 1:
            raise InvalidRequestError(
                f"draft_cache was passed, and draft is {type(draft).__name__}, with "
                f"{models} models instead of 1. Leave draft_cache out."
            )
        running = self._busy() if self._busy is not None else None
        if running is not None and not running.ended:
            raise InvalidRequestError(
                "The drafter serves 1 open stream, and a second one was asked for. "
                "Close the first, or pass a draft model instead of a drafter."
            )

        def make(model: nn.Module) -> DraftModel:
            return make_draft_model(
                model,
                self._sliding,
                target,
                draft_cache,
                sequence,
                self._draft_confidence,
                self._reduced.of(model),
            )

        def follow(head: Following) -> Drafter:
            return head.for_stream(target, sequence)

        note = statistics.drafter_faults.append
        return drafter_of_stream(draft, make, follow, note, target)

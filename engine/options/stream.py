"""The options of a stream, and what is refused before anything is touched."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from mlx_speculation.caches import KVQuantization
from mlx_speculation.engine.argument_checks import checked_count
from mlx_speculation.engine.draft_length.base import DraftLengthPolicy
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import usual_prefill_step
from mlx_speculation.samplers import Acceptance, Chooser, Constraint, Sampling


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StreamOptions:
    """The options of a stream, checked as far as one value goes.

    Attributes:
        max_tokens: how many tokens to generate at most, 0 or more.
        sampling: how tokens are chosen; greedy when omitted.
        stop: texts that end the generation; the text is cut before them.
        stop_tokens: ids that end it; the tokenizer's own when omitted.
        draft_length: overrides the generator's; a `DraftLengthPolicy` of your own
            is asked before each round.
        max_draft: no draft of this stream is longer; None: no limit of its own.
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
            rounds some 1 % slower, see `engine.timing`.
        prefill_step_size: how many tokens of a prompt are fed at once; None: 2048,
            and 256 on a CPU, where Ctrl-C would wait long for more.
        prompt_progress: called with the number of tokens of every chunk of the
            prompt that the target has read.
        kv_quantization: when the target's caches are quantized; None: never.
        logprob_rows: let each chunk's log-probability hold those of all ids.
        yielded_only: after `close()` the caller's caches hold the prompt and the
            yielded tokens, and nothing of a round that was not yielded. Its price
            is some forwards, at most a draft's tokens, at such a close.
        level_draft: at the end, let the draft model's caches hold what the
            target's do.
        prediction: a text, or its token ids, that the output may repeat in part, such
            as the file that is to be edited. Lookups of the draft look in it.
        images: what the prompt's image parts show, in their order: paths, bytes,
            data URLs or pictures of Pillow; for a target that reads images.

    Raises:
        InvalidRequestError: a value is out of range or of the wrong kind.
    """

    max_tokens: int = 256
    sampling: Sampling | None = None
    stop: str | Sequence[str] = ()
    stop_tokens: Collection[int] | None = None
    draft_length: int | DraftLengthPolicy | None = None
    max_draft: int | None = None
    prompt_cache: list[Any] | None = None
    cached_tokens: Iterable[int] | None = None
    draft_cache: list[Any] | None = None
    logprobs: int | None = None
    constraint: Constraint | None = None
    explain: bool = False
    prefill_step_size: int | None = None
    prompt_progress: Callable[[int], None] | None = None
    kv_quantization: KVQuantization | None = None
    logprob_rows: bool = False
    yielded_only: bool = False
    level_draft: bool = False
    prediction: str | Sequence[int] | None = None
    images: Sequence[Any] = ()

    def __post_init__(self) -> None:
        _check_sampling(self.sampling)
        checked_count("max_tokens", self.max_tokens, 0)
        if self.logprobs is not None:
            hint = ", or None: how many of the most probable tokens to report"
            checked_count("logprobs", self.logprobs, 0, hint)
        if "" in self.stops:
            raise InvalidRequestError("A stop string is empty. Leave it out.")
        if self.constraint is not None:
            _check_constraint(self.constraint)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def prefill_step(self) -> int:
        """Number of prompt tokens that are fed at once here."""
        return self.prefill_step_size or usual_prefill_step()

    @property
    def own_caches(self) -> bool:
        """Return whether the caller's caches are written to."""
        return self.prompt_cache is not None or self.draft_cache is not None


class StreamKeywords(TypedDict, total=False):
    """The fields of `StreamOptions` as keywords, for type checkers."""

    max_tokens: int
    sampling: Sampling | None
    stop: str | Sequence[str]
    stop_tokens: Collection[int] | None
    draft_length: int | DraftLengthPolicy | None
    max_draft: int | None
    prompt_cache: list[Any] | None
    cached_tokens: Iterable[int] | None
    draft_cache: list[Any] | None
    logprobs: int | None
    constraint: Constraint | None
    explain: bool
    prefill_step_size: int | None
    prompt_progress: Callable[[int], None] | None
    kv_quantization: KVQuantization | None
    logprob_rows: bool
    yielded_only: bool
    level_draft: bool
    prediction: str | Sequence[int] | None
    images: Sequence[Any]


def check_rule(acceptance: Acceptance, chooser: Chooser) -> None:
    """Refuse a rule that the request's sampler or processors do not allow."""
    if acceptance != "keyed" and chooser.sampling.sampler is not None:
        raise InvalidRequestError(
            f"acceptance is {acceptance!r}, which has to know the "
            "probabilities of each row, and a sampler draws by itself. Use "
            "acceptance='keyed', or give the options of the sampler in Sampling."
        )
    if acceptance == "block" and not chooser.processors.parallel:
        raise InvalidRequestError(
            "acceptance is 'block', which has to process all rows, and a logits "
            "processor may only see rows whose tokens are emitted. Declare it with "
            "mlx_speculation.pure, or use acceptance='rejection'."
        )


def check_own_choice(sampling: Sampling) -> None:
    """Refuse a sampler in exact mode: a text of a seed needs noise by position."""
    if sampling.sampler is not None:
        raise InvalidRequestError(
            "exact was passed, and a sampler, which draws for each row that a draft "
            "brings. Give its options in Sampling, or make it with "
            "mlx_speculation.make_sampler."
        )


def _check_constraint(constraint: Any) -> None:
    """Refuse what is no constraint."""
    if not isinstance(constraint, Constraint):
        raise InvalidRequestError(
            f"constraint is a {type(constraint).__name__}, and a Constraint is "
            "needed. Make one with mlx_speculation.json_schema(...)."
        )


def _check_sampling(sampling: Any) -> None:
    """Refuse options that are not in a `Sampling`."""
    if sampling is not None and not isinstance(sampling, Sampling):
        raise InvalidRequestError(
            f"sampling is {sampling!r}, and a Sampling is needed, such as "
            "Sampling(temperature=0.8, seed=1)."
        )

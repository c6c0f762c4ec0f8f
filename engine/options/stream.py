"""The options of a stream, and their checks."""

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
    """The options of a stream. Each value is checked on its own.

    Attributes:
        max_tokens: how many tokens to generate at most, 0 or more.
        sampling: options of the choice of tokens; None: greedy.
        stop: texts that end the generation; the text is cut before them.
        stop_tokens: token ids that end the text; None: the tokenizer's end tokens.
        draft_length: tokens to draft in a round, or a `DraftLengthPolicy`, which plans
            each round; None: the generator's draft length.
        max_draft: the most tokens to draft in a round of this stream; None: no limit.
        prompt_cache: the caller's mlx-lm caches of the target. `prompt` continues the
            tokens that they hold. The stream writes to them.
        cached_tokens: the token ids that `prompt_cache` holds. None: penalties and
            drafters do not see these tokens, and the prompt begins at the caches'
            offset, or at position 0 if no cache has one (recurrent layers only).
        draft_cache: caches of the draft model that hold `cached_tokens` or a prefix of
            them.
        logprobs: report the log-probability of each token and of this many most
            probable tokens; 0: of the token only; None: no report.
        constraint: a constraint on the generated text, like `json_schema(...)`. A text
            with the finish reason "stop" fits it, unless a stop string has cut it.
            Stop tokens are allowed where the text may end. If no other token is allowed
            there, the text ends without a stop token.
        explain: keep for each round in `stream.decisions` the draft length, the reason
            for it, and the parts of the round's time. Rounds become about 1 % slower.
        prefill_step_size: how many tokens of a prompt one forward reads; None: 2048,
            and 256 on a CPU, since Ctrl-C has to wait for the end of a forward.
        prompt_progress: called with the number of tokens of each chunk of the prompt
            that the target has read.
        kv_quantization: of the target's caches; None: they stay as they are.
        logprob_rows: add the log-probabilities of all ids to each chunk's `logprob`.
        yielded_only: after `close()`, let the caller's caches hold only the prompt and
            the yielded tokens. This may cost further forwards, over at most as many
            tokens as a draft has.
        level_draft: at the end, feed the draft model all tokens that the target holds.
        prediction: a text, or its token ids, that the output may repeat in part, such
            as a file to be edited. A lookup searches it.
        images: the images of the prompt's image parts, in their order: paths, bytes,
            data URLs or Pillow images. Only for a target that reads images.

    Raises:
        InvalidRequestError: a value is out of range or of the wrong type.
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
        """Number of prompt tokens that one forward reads."""
        return self.prefill_step_size or usual_prefill_step()

    @property
    def own_caches(self) -> bool:
        """Return whether the stream writes to caches of the caller."""
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
    """Refuse an acceptance rule that the sampler or the processors do not allow."""
    if acceptance != "keyed" and chooser.sampling.sampler is not None:
        raise InvalidRequestError(
            f"acceptance is {acceptance!r}, which needs the probabilities of each "
            "row, but a sampler returns only the token that it draws. Use "
            "acceptance='keyed', or give the options of the sampler in Sampling."
        )
    if acceptance == "block" and not chooser.processors.parallel:
        raise InvalidRequestError(
            "acceptance is 'block', which processes all rows, but a logits processor "
            "that is not pure must only see rows whose tokens are emitted. Declare it "
            "with mlx_speculation.pure, or use acceptance='rejection'."
        )


def check_own_choice(sampling: Sampling) -> None:
    """Refuse a sampler function in exact mode, which needs noise keyed by position."""
    if sampling.sampler is not None:
        raise InvalidRequestError(
            "exact cannot be combined with a sampler: it draws once for each row, and "
            "a draft adds rows, so later draws would depend on the draft. Give its "
            "options in Sampling, or make it with mlx_speculation.make_sampler."
        )


def _check_constraint(constraint: Any) -> None:
    if not isinstance(constraint, Constraint):
        raise InvalidRequestError(
            f"constraint is a {type(constraint).__name__}, and a Constraint is "
            "needed. Make one with mlx_speculation.json_schema(...)."
        )


def _check_sampling(sampling: Any) -> None:
    if sampling is not None and not isinstance(sampling, Sampling):
        raise InvalidRequestError(
            f"sampling is {sampling!r}, and a Sampling is needed, such as "
            "Sampling(temperature=0.8, seed=1)."
        )

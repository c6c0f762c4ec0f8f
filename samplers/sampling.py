"""The sampling options of one request, checked where the user gives them."""

import hashlib
import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from mlx_speculation.errors import InvalidRequestError

SEED_LIMIT = 2**64
SMALLEST_TEMPERATURE = 1e-30  # below it, scores overflow float32

# (tokens int32 [n], logits [1, vocab]) -> logits [1, vocab]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
# log-probabilities [1, vocab] -> token ids [1]
Sampler = Callable[[mx.array], mx.array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling options: mlx-lm's, with its defaults and in its order.

    1. Processors, on logits: `logit_bias`, the repetition, presence and frequency
       penalties, then `logits_processors` in their order.
    2. Filters, on the log-probabilities before any temperature: `top_p`, `min_p`, XTC,
       `top_k`. Of equally probable tokens top-k keeps those with the lowest ids.
    3. `temperature`.

    At temperature 0 processors apply and filters do not, as in mlx-lm. A filter or a
    penalty of 0 or None is off. Lists and mappings are stored as tuples.

    Attributes:
        temperature: 0 chooses the most probable token.
        top_p: keep the smallest set of tokens with this much probability.
        min_p: drop tokens less probable than this share of the largest probability.
        min_tokens_to_keep: how many tokens min_p leaves at least.
        top_k: keep this many of the most probable tokens.
        xtc_probability: how often XTC drops the most probable tokens.
        xtc_threshold: from 0 to 0.5. Of the tokens more probable than this, XTC keeps
            the least probable one only.
        xtc_special_tokens: ids that XTC never drops, usually line ends and end-of-text.
        repetition_penalty: divides positive logits of earlier tokens and multiplies
            negative ones.
        repetition_context_size: how many of the last tokens the penalty sees; 0: the
            whole text, as in mlx-lm.
        presence_penalty: subtracted from the logits of earlier tokens.
        presence_context_size: as `repetition_context_size`.
        frequency_penalty: subtracted from a token's logit once per occurrence.
        frequency_context_size: as `repetition_context_size`.
        logit_bias: added to the logits of token ids: a mapping of ids to values.
        logits_processors: callables with mlx-lm's signature, see `LogitsProcessor`.
            `logits.processor_kinds` says which of them keep speculation fast.
        draft_temperature: the temperature of drafts; None: `temperature`. This changes
            how many drafted tokens are accepted, never the distribution of the text.
        seed: decides the text at a temperature above 0; None draws a seed, which the
            result reports.
        sampler: draws tokens itself, from a row's log-probabilities [1, vocab] after
            processors, as mlx-lm's samplers do. A round calls it for every row, so
            rejected rows change its state too: a draft changes the text, but not its
            distribution. Temperature and filters must be off.

    Raises:
        InvalidRequestError: a value is out of its range.
    """

    temperature: float = 0.0
    top_p: float = 0.0
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    top_k: int = 0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_special_tokens: Sequence[int] = ()
    repetition_penalty: float | None = None
    repetition_context_size: int = 20
    presence_penalty: float | None = None
    presence_context_size: int = 20
    frequency_penalty: float | None = None
    frequency_context_size: int = 20
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None = ()
    logits_processors: Sequence[LogitsProcessor] = ()
    draft_temperature: float | None = None
    seed: int | None = None
    sampler: Sampler | None = None

    def __post_init__(self) -> None:
        self._freeze()
        _check("temperature", self.temperature, 0.0, math.inf)
        if self.draft_temperature is not None:
            _check("draft_temperature", self.draft_temperature, 0.0, math.inf, "")
        _check("top_p", self.top_p, 0.0, 1.0)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check_count("min_tokens_to_keep", self.min_tokens_to_keep, 1)
        _check_count("top_k", self.top_k, 0)
        _check("xtc_probability", self.xtc_probability, 0.0, 1.0)
        _check("xtc_threshold", self.xtc_threshold, 0.0, 0.5, "")
        for token in self.xtc_special_tokens:
            _check_count("An id in xtc_special_tokens", token, 0)
        lowest = {"repetition": 0.0, "presence": -math.inf, "frequency": -math.inf}
        for kind, low in lowest.items():
            penalty = getattr(self, f"{kind}_penalty")
            _check(f"{kind}_penalty", 0 if penalty is None else penalty, low, math.inf)
            size = f"{kind}_context_size"
            _check_count(size, getattr(self, size), 0)
        if self.seed is not None:
            check_seed(self.seed)
        if self.sampler is not None:
            self._check_sampler()

    def _check_sampler(self) -> None:
        """Refuse a sampler that cannot be called, and options that it would ignore."""
        if not callable(self.sampler):
            raise InvalidRequestError(
                f"sampler is a {type(self.sampler).__name__}, and a callable (log-"
                "probabilities [1, vocab]) -> token ids [1] is needed."
            )
        if self.temperature != 0 or self.filters or self.draft_temperature is not None:
            raise InvalidRequestError(
                "sampler was passed with a temperature above 0, filters or "
                "draft_temperature, which it ignores. Pass one or the other."
            )

    def _freeze(self) -> None:
        special = _items("xtc_special_tokens", self.xtc_special_tokens)
        object.__setattr__(self, "xtc_special_tokens", special)
        object.__setattr__(self, "logit_bias", _pairs(self.logit_bias))
        processors = _items("logits_processors", self.logits_processors)
        object.__setattr__(self, "logits_processors", processors)
        wrong = next((p for p in processors if not callable(p)), None)
        if wrong is not None:
            raise InvalidRequestError(
                f"A logits processor is a {type(wrong).__name__}, and a callable "
                "(tokens, logits) -> logits is needed."
            )

    @property
    def greedy(self) -> bool:
        """Return whether the most probable token is always chosen."""
        return self.sampler is None and self.temperature < SMALLEST_TEMPERATURE

    @property
    def filters(self) -> bool:
        """Return whether any filter is on."""
        nucleus = 0 < self.top_p < 1 or self.min_p > 0 or self.top_k > 0
        return nucleus or self.xtc_probability > 0

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """The logit bias as pairs of an id and a value."""
        assert isinstance(self.logit_bias, tuple)  # see `_freeze`
        return self.logit_bias

    @property
    def for_drafts(self) -> "Sampling":
        """The options of drafts."""
        if self.sampler is not None:
            # Greedy: the draft's most probable token is accepted most often, since
            # drafts do not share the sampler's random numbers.
            return replace(self, sampler=None)
        if self.draft_temperature is None:
            return self
        return replace(self, temperature=self.draft_temperature)

    def with_seed(self) -> "Sampling":
        """Return these options with a seed, drawn if there was none."""
        if self.seed is not None:
            return self
        return replace(self, seed=secrets.randbits(32))


def derived_seed(seed: int, index: int) -> int:
    """Return the seed of sample `index` of a prompt.

    Sample 0 has the request's seed. The seeds of later samples are 64 bits of a BLAKE2b
    hash of seed and index: among a million samples, two share a seed with a probability
    of 3e-8.

    Raises:
        InvalidRequestError: seed or index is not from 0 to 2**64 - 1.
    """
    check_seed(seed)
    check_seed(index, "index")
    if index == 0:
        return seed
    words = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")


def check_seed(seed: int, name: str = "seed") -> None:
    """Refuse values that are not whole numbers of 64 bits."""
    _check_count(name, seed, 0)
    if seed >= SEED_LIMIT:
        raise InvalidRequestError(
            f"{name} is {seed}, and the largest is {SEED_LIMIT - 1}."
        )


def _check(
    name: str, value: float, low: float, high: float, more: str = "; 0 turns it off"
) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value <= high or math.isinf(value):
        limits = f" from {low:g} to {high:g}"
        if high == math.inf:
            limits = "" if low == -math.inf else f" of {low:g} or more"
        raise InvalidRequestError(
            f"{name} is {value!r}, and a finite number{limits} is needed{more}."
        )


def _check_count(name: str, value: int, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise InvalidRequestError(
            f"{name} is {value!r}, and a whole number of at least {low} is needed."
        )


def _items(name: str, values: Any) -> tuple[Any, ...]:
    if values is None:
        return ()
    if not isinstance(values, Iterable) or isinstance(values, str):
        raise InvalidRequestError(
            f"{name} is {values!r}, and a list is needed. Put it into one."
        )
    return tuple(values)


def _pairs(bias: Any) -> tuple[tuple[int, float], ...]:
    """Return pairs of an id and a value; minus infinity forbids an id."""
    items = bias.items() if isinstance(bias, Mapping) else _items("logit_bias", bias)
    pairs = []
    for item in items:
        if not isinstance(item, tuple) or len(item) != 2:
            raise InvalidRequestError(
                f"logit_bias has the item {item!r}, but each item has to be a token id "
                "with a value, such as {50: -2.5}."
            )
        _check_count("An id in logit_bias", item[0], 0)
        value = item[1]
        if value != -math.inf:
            _check(f"logit_bias of id {item[0]}", value, -math.inf, math.inf)
        pairs.append((item[0], float(value)))
    if len(dict(pairs)) != len(pairs):
        raise InvalidRequestError(
            f"logit_bias has {len(pairs)} values for {len(dict(pairs))} different ids. "
            "Give each id one value."
        )
    return tuple(pairs)

"""The sampling options of one request, checked where the user gives them."""

import math
import secrets
from dataclasses import dataclass, replace

from mlx_speculation.errors import InvalidRequestError

SEED_LIMIT = 2**64
SMALLEST_TEMPERATURE = 1e-30  # below it, scores overflow float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen. 0 means off, as in mlx-lm, with mlx-lm's defaults.

    The order is mlx-lm's: top-p, min-p and top-k on the untempered log-probabilities,
    then temperature. Among equals at top-k's edge the lowest ids stay.

    Attributes:
        temperature: 0 chooses the most probable token.
        top_p: keep the smallest set of tokens with this much probability.
        min_p: drop tokens less probable than this share of the most probable one.
        min_tokens_to_keep: how many tokens min_p leaves at least.
        top_k: keep this many of the most probable tokens.
        draft_temperature: the temperature of proposals; None takes `temperature`. It
            changes how many are accepted, never the text or its law.
        seed: decides the text at a temperature above 0; None draws one, which the
            result reports.

    Raises:
        InvalidRequestError: a value is out of its range.
    """

    temperature: float = 0.0
    top_p: float = 0.0
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    top_k: int = 0
    draft_temperature: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        """Check every value against its range."""
        _check("temperature", self.temperature, 0.0, math.inf)
        if self.draft_temperature is not None:
            _check("draft_temperature", self.draft_temperature, 0.0, math.inf)
        _check("top_p", self.top_p, 0.0, 1.0)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check_count("min_tokens_to_keep", self.min_tokens_to_keep, 1)
        _check_count("top_k", self.top_k, 0)
        if self.seed is not None:
            _check_count("seed", self.seed, 0)
            if self.seed >= SEED_LIMIT:
                raise InvalidRequestError(
                    f"seed is {self.seed}, and the largest is {SEED_LIMIT - 1}."
                )

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always chosen."""
        return self.temperature < SMALLEST_TEMPERATURE

    @property
    def filters(self) -> bool:
        """Whether any filter is on."""
        return 0 < self.top_p < 1 or self.min_p > 0 or self.top_k > 0

    @property
    def for_drafts(self) -> "Sampling":
        """The options of proposals."""
        if self.draft_temperature is None:
            return self
        return replace(self, temperature=self.draft_temperature)

    def with_seed(self) -> "Sampling":
        """Return these options with a seed, drawn if there was none."""
        if self.seed is not None:
            return self
        return replace(self, seed=secrets.randbits(32))


def _check(name: str, value: float, low: float, high: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value <= high or math.isinf(value):
        raise InvalidRequestError(
            f"{name} is {value!r}, and a finite number from {low:g} to {high:g} is "
            "needed; 0 turns it off."
        )


def _check_count(name: str, value: int, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise InvalidRequestError(
            f"{name} is {value!r}, and a whole number of at least {low} is needed."
        )

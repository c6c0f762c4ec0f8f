"""What a stream refuses, before anything is touched."""

from collections.abc import Sequence
from typing import Any

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.samplers import Acceptance, Chooser, Constraint


def check_counts(max_tokens: Any, logprobs: Any) -> None:
    """Refuse what is no number of tokens, and no number of ids to report."""
    if not _is_count(max_tokens):
        raise InvalidRequestError(
            f"max_tokens is {max_tokens!r}, and 0 or more is needed."
        )
    if logprobs is not None and not _is_count(logprobs):
        raise InvalidRequestError(
            f"logprobs is {logprobs!r}, and None or a whole number of at least 0 "
            "is needed: how many of the most probable tokens to report."
        )


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


def checked_stops(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Return the stop strings; none is empty."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if "" in stops:
        raise InvalidRequestError("A stop string is empty. Leave it out.")
    return stops


def check_constraint(constraint: Any) -> None:
    """Refuse what is no constraint."""
    if not isinstance(constraint, Constraint):
        raise InvalidRequestError(
            f"constraint is a {type(constraint).__name__}, and a Constraint is "
            "needed. Make one with mlx_speculation.json_schema(...)."
        )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0

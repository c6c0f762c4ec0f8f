"""Costs and log-probabilities in OpenAI's forms.

Log-probabilities carry ids, as those of mlx-lm's server do; `usage.speculative` is
ours.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mlx_speculation.engine.stats import SourceCounts
from mlx_speculation.server.apis.base import Ending
from mlx_speculation.server.job import Alternative, Token

if TYPE_CHECKING:
    from mlx_speculation.engine import Result

BROKEN = "\N{REPLACEMENT CHARACTER}"


def usage(ending: Ending, draft: str | None, *, predicted: bool) -> dict[str, Any]:
    """Return what a text has cost; drafts count as predictions where there is none."""
    result, stats = ending.result, ending.result.stats
    drafts: Any = stats.sources.get("prediction", SourceCounts())
    drafts = drafts if predicted else stats
    return {
        "prompt_tokens": ending.prompt_tokens,
        "completion_tokens": ending.tokens,
        "total_tokens": ending.prompt_tokens + ending.tokens,
        "prompt_tokens_details": {"cached_tokens": stats.reused},
        "completion_tokens_details": {
            "reasoning_tokens": ending.reasoning_tokens,
            "accepted_prediction_tokens": drafts.accepted,
            "rejected_prediction_tokens": drafts.drafted - drafts.accepted,
        },
        "speculative": speculative(result, draft),
    }


def speculative(result: "Result", draft: str | None) -> dict[str, Any]:
    """Return what was drafted of a text."""
    stats = result.stats
    return {
        "draft": draft,
        "seed": result.seed,
        "rounds": stats.rounds,
        "drafts": stats.drafts,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "acceptance_rate": stats.acceptance_rate,
        "mean_accepted_length": stats.mean_accepted_length,
        "accepted_per_position": list(stats.accepted_per_position),
        "drafter_faults": len(stats.drafter_faults),
    }


def total(usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what several texts have cost together."""
    if len(usages) == 1:
        return usages[0]
    speculative = [usage["speculative"] for usage in usages]
    counts = {
        name: sum(each[name] for each in speculative)
        for name in ("rounds", "drafts", "drafted", "accepted", "drafter_faults")
    }
    drafts, drafted = counts["drafts"], counts["drafted"]
    width = max(len(each["accepted_per_position"]) for each in speculative)
    reached = [
        sum(
            each["drafts"] * (*each["accepted_per_position"], *[0.0] * width)[place]
            for each in speculative
        )
        for place in range(width)
    ]
    return {
        **_sums(usages),
        "speculative": {
            **speculative[0],
            **counts,
            "acceptance_rate": counts["accepted"] / drafted if drafted else 0.0,
            "mean_accepted_length": 1 + (counts["accepted"] / drafts if drafts else 0),
            "accepted_per_position": [one / drafts for one in reached],
        },
    }


def _sums(usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums of all counts of tokens."""
    return {
        name: _sums([usage[name] for usage in usages])
        if isinstance(value, dict)
        else sum(usage[name] for usage in usages)
        for name, value in usages[0].items()
        if name != "speculative"
    }


def chat_logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
    """Return log-probabilities as chats have them."""
    return {
        "content": [
            {
                **_entry(token.alternative),
                "top_logprobs": [_entry(one) for one in token.top],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def text_logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
    """Return log-probabilities as completions have them."""
    return {
        "tokens": [token.text for token in tokens],
        "token_ids": [token.alternative.id for token in tokens],
        "token_logprobs": [token.alternative.value for token in tokens],
        "top_logprobs": [_by_text(token.top) for token in tokens],
        "text_offset": [token.start for token in tokens],
    }


def _by_text(top: Sequence[Alternative]) -> dict[str, float]:
    """Return the most probable token of each text, the most probable first."""
    values: dict[str, float] = {}
    for one in top:
        values.setdefault(one.text, one.value)
    return values


def _entry(one: Alternative) -> dict[str, Any]:
    """Return one token; bytes of half a character are not known from its text."""
    known = BROKEN not in one.text
    return {
        "id": one.id,
        "token": one.text,
        "logprob": one.value,
        "bytes": list(one.text.encode("utf-8")) if known else None,
    }

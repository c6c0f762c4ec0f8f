"""Costs and log-probabilities in OpenAI's forms.

Log-probabilities carry ids, as those of mlx-lm's server do; `usage.speculative` is
ours.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from mlx_speculation.engine.stats import SourceCounts, Statistics
from mlx_speculation.server.apis.base import Ending
from mlx_speculation.server.job import Alternative, Token

BROKEN = "\N{REPLACEMENT CHARACTER}"


def usage(
    endings: Sequence[Ending], draft: str | None, *, predicted: bool
) -> dict[str, Any]:
    """Return what texts have cost; without a prediction drafts count as predicted."""
    prompt = sum(each.prompt_tokens for each in endings)
    tokens = sum(each.tokens for each in endings)
    every = [each.result.stats for each in endings]
    drafts: list[Any] = every
    if predicted:
        drafts = [each.sources.get("prediction", SourceCounts()) for each in every]
    accepted = sum(each.accepted for each in drafts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "total_tokens": prompt + tokens,
        "prompt_tokens_details": {"cached_tokens": sum(each.reused for each in every)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(each.reasoning_tokens for each in endings),
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(e.drafted for e in drafts) - accepted,
        },
        "speculative": speculative(endings, draft),
    }


def speculative(endings: Sequence[Ending], draft: str | None) -> dict[str, Any]:
    """Return what was drafted of texts."""
    every = [each.result.stats for each in endings]
    reached = zip_longest(*(each.reached for each in every), fillvalue=0)
    stats = Statistics(
        rounds=sum(each.rounds for each in every),
        drafts=sum(each.drafts for each in every),
        drafted=sum(each.drafted for each in every),
        accepted=sum(each.accepted for each in every),
        reached=[sum(place) for place in reached],
    )
    sources = dict.fromkeys(name for each in every for name in each.sources)
    return {
        "draft": ", ".join(sources) or None if draft == "auto" else draft,
        "seed": endings[0].result.seed,
        "rounds": stats.rounds,
        "drafts": stats.drafts,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "acceptance_rate": stats.acceptance_rate,
        "mean_accepted_length": stats.mean_accepted_length,
        "accepted_per_position": list(stats.accepted_per_position),
        "drafter_faults": sum(len(each.drafter_faults) for each in every),
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
        "tokens": [token.alternative.text for token in tokens],
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

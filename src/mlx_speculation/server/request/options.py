"""How a request wants its text: sampling, ends, log-probabilities, a schema, drafts."""

import json
from typing import Any

from mlx_speculation.server.api_errors import invalid
from mlx_speculation.server.config import Settings
from mlx_speculation.server.request.fields import Fields

SEEDS = 2**64
MOST_ALTERNATIVES = 20
# Each token is compared with every beginning of a stop.
MOST_STOPS, LONGEST_STOP = 16, 500
# The time that a grammar takes grows with the square of this, and all wait for it.
LARGEST_SCHEMA = 1 << 15
# Logits are divided by it, and have to stay finite.
SMALLEST_DIVISOR = 0.01
PENALTIES = ("repetition", "presence", "frequency")


def sampling(fields: Fields, settings: Settings) -> dict[str, Any]:
    """Return the options of `Sampling`."""
    defaults = settings.defaults
    options: dict[str, Any] = {
        "temperature": fields.number("temperature", defaults.temperature, 0, 100),
        "top_p": fields.number("top_p", defaults.top_p, 0, 1),
        "min_p": fields.number("min_p", defaults.min_p, 0, 1),
        "top_k": fields.whole("top_k", defaults.top_k, 0, 2**31),
        "xtc_probability": fields.number("xtc_probability", 0, 0, 1),
        "xtc_threshold": fields.number("xtc_threshold", 0.1, 0, 0.5),
        "logit_bias": _logit_bias(fields),
        "seed": _seed(fields),
    }
    for kind in PENALTIES:
        low = 0 if kind == "repetition" else -100
        name, size = f"{kind}_penalty", f"{kind}_context_size"
        options[name] = value = fields.number(name, 0, low, 100)
        if kind == "repetition" and 0 < value < SMALLEST_DIVISOR:
            raise fields.wrong(name, value, f"0 or at least {SMALLEST_DIVISOR:g}")
        options[size] = fields.whole(size, 20, 0, 2**31)
    return options


def _seed(fields: Fields) -> int | None:
    """Return a seed of 64 bits; negative ones count from the top."""
    seed = fields.whole("seed", None, -(2**63), SEEDS - 1)
    return None if seed is None else seed % SEEDS


def _logit_bias(fields: Fields) -> dict[int, float]:
    bias = fields.object("logit_bias") or {}
    inner = Fields(bias, "logit_bias.")
    found = {}
    for name in bias:
        if not (name.isascii() and name.isdigit() and len(name) < 10):
            raise fields.wrong("logit_bias", name, "token ids as names")
        found[int(name)] = inner.number(name, 0, -100, 100)
    return found


def stop(fields: Fields) -> tuple[str, ...]:
    """Return the texts that end it."""
    given = fields.take("stop", [])
    stops = [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or not all(
        isinstance(stop, str) and stop for stop in stops
    ):
        raise fields.wrong("stop", given, "a text, or a list of texts, none empty,")
    longest = max(map(len, stops), default=0)
    if len(stops) > MOST_STOPS or longest > LONGEST_STOP:
        raise invalid(
            f"stop holds {len(stops)} texts of up to {longest} characters, and "
            f"{MOST_STOPS} of up to {LONGEST_STOP} may be.",
            "stop",
        )
    return tuple(stops)


def chat_logprobs(fields: Fields) -> int | None:
    """Return the number of alternatives that a chat wants; None: nothing."""
    wanted = fields.flag("logprobs")
    # -1 is mlx-lm's way of saying none.
    top = fields.whole("top_logprobs", None, -1, MOST_ALTERNATIVES)
    if top is not None and top > 0 and not wanted:
        raise invalid("top_logprobs is given without logprobs: true.", "top_logprobs")
    return max(top or 0, 0) if wanted else None


def text_logprobs(fields: Fields) -> int | None:
    """Return the number of alternatives, in OpenAI's way or in the chat's."""
    given = fields.take("logprobs")
    if given is None or isinstance(given, bool):
        again = {"logprobs": given, "top_logprobs": fields.take("top_logprobs")}
        return chat_logprobs(Fields(again))
    return Fields({"logprobs": given}).whole("logprobs", None, 0, MOST_ALTERNATIVES)


def schema(fields: Fields, *, calls: bool) -> dict[str, Any] | None:
    """Return the JSON schema that the text has to fit, unless it is a tool call."""
    given = fields.object("response_format")
    if given is None:
        return None
    inner = Fields(given, "response_format.")
    kind = inner.only("type", "text", "json_object", "json_schema")
    if kind is None:
        raise inner.wrong("type", None, "'text', 'json_object' or 'json_schema'")
    described = inner.object("json_schema")
    inner.end("A schema is given as response_format.json_schema.schema.")
    if kind == "text":
        return None
    if calls:
        raise invalid(
            "response_format asks for JSON, and tool_choice for a call. Leave one of "
            "them out.",
            "tool_choice",
        )
    if kind == "json_object":
        return {"type": "object"}
    if described is None:
        raise inner.wrong("json_schema", None, "an object with a schema")
    details = Fields(described, "response_format.json_schema.")
    found = details.object("schema")
    if found is None:
        raise details.wrong("schema", None, "a JSON schema")
    details.without_effect("name", "description", "strict")
    details.end()
    size = len(json.dumps(found))
    if size > LARGEST_SCHEMA:
        raise invalid(
            f"The schema has {size} characters, and {LARGEST_SCHEMA} may be.",
            "response_format",
        )
    return found


def speculative(
    fields: Fields, settings: Settings
) -> tuple[str | None, int | None, int | None, bool]:
    """Return what drafts, how long, how long at most, and whether it is exact mode."""
    given = fields.object("speculative")
    most = settings.limits.draft_tokens
    mlx_lm_length = fields.whole("num_draft_tokens", None, 0, most, "max-draft")
    fields.only("draft_model", "default_model")
    if given is None:
        return None, mlx_lm_length, None, False
    inner = Fields(given, "speculative.")
    name = inner.text("draft")
    max_draft = inner.whole("max_draft", None, 0, most, "max-draft")
    off, exact = inner.flag("off"), inner.flag("exact")
    inner.end()
    known = [one for one in (settings.draft, "lookup") if one is not None]
    if name is not None and name not in known:
        raise invalid(
            f"speculative.draft is {name[:200]!r}, and there is "
            f"{' and '.join(repr(one) for one in dict.fromkeys(known))}.",
            "speculative.draft",
        )
    if off and (mlx_lm_length or max_draft or name is not None):
        raise invalid(
            "speculative.off is true, and draft, max_draft or num_draft_tokens asks "
            "for drafts. Leave one of them out.",
            "speculative.off",
        )
    name = None if name == settings.draft else name
    return name, 0 if off else mlx_lm_length, max_draft, exact

"""What a request asks for, once every field has been checked.

Fields that would change the text and are not offered are refused, not passed over; so
is every name that is not known.
"""

import json
from dataclasses import dataclass
from typing import Any

from mlx_speculation.server.chats import checked_messages, checked_tools
from mlx_speculation.server.fields import Fields
from mlx_speculation.server.refusals import ApiError, invalid
from mlx_speculation.server.settings import Settings

SEEDS = 2**64
MOST_ALTERNATIVES = 20
# Each token is compared with every beginning of a stop.
MOST_STOPS, LONGEST_STOP = 16, 500
# The time that a grammar takes grows with the square of this, and all wait for it.
LARGEST_SCHEMA = 1 << 15
# Logits are divided by it, and have to stay finite.
SMALLEST_DIVISOR = 0.01
PENALTIES = ("repetition", "presence", "frequency")
# Keywords of a chat template that are not the template's: a client's own template could
# run for ever.
RESERVED = frozenset(
    (
        *("add_generation_prompt", "chat_template", "continue_final_message"),
        *("conversation", "documents", "max_length", "messages", "padding"),
        *("return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize"),
        *("tokenizer_kwargs", "tools", "truncation"),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request.

    Attributes:
        chat: whether it came to the chat's path.
        body: what mlx-lm's server has to know of it.
        prompt: of a completion, text or token ids; None: a chat.
        template_args: keywords for the chat template.
        stream: whether the answer comes in pieces.
        max_tokens: of the text.
        sampling: the options of `Sampling`.
        stop: texts that end it.
        logprobs: how many alternatives to report beside each token; None: nothing.
        schema: that the text has to fit; None: any text.
        draft: the name of what drafts; None: the server's own.
        draft_length: tokens drafted in a round at most; None: as many as pay.
    """

    chat: bool
    body: dict[str, Any]
    prompt: str | list[int] | None
    template_args: dict[str, Any] | None
    stream: bool
    max_tokens: int
    sampling: dict[str, Any]
    stop: tuple[str, ...]
    logprobs: int | None
    schema: dict[str, Any] | None
    draft: str | None
    draft_length: int | None


def read_request(given: dict[str, Any], settings: Settings, *, chat: bool) -> Asked:
    """Check a request.

    Args:
        given: the object that the client has sent.
        settings: of the server.
        chat: whether it came to the chat's path.

    Raises:
        ApiError: names the field that is wrong.
    """
    fields = Fields(given)
    body: dict[str, Any] = {"model": _model(fields, settings)}
    body["stream"] = stream = fields.flag("stream")
    body["stream_options"] = _stream_options(fields, stream)
    prompt = None
    template_args = None
    if chat:
        body["messages"] = checked_messages(fields)
        body["tools"] = checked_tools(fields)
        template_args = _template_args(fields)
    else:
        prompt = _prompt(fields)
        body["prompt"] = ""
    draft, length = _speculative(fields, settings)
    asked = Asked(
        chat=chat,
        body=body,
        prompt=prompt,
        template_args=template_args,
        stream=stream,
        max_tokens=_max_tokens(fields, settings),
        sampling=_sampling(fields, settings),
        stop=_stop(fields),
        logprobs=_chat_logprobs(fields) if chat else _text_logprobs(fields),
        schema=_schema(fields),
        draft=draft,
        draft_length=length,
    )
    _refuse_the_rest(fields)
    return asked


def _model(fields: Fields, settings: Settings) -> str:
    name = fields.text("model", settings.names[0])
    if name not in ("default_model", *settings.names):
        raise ApiError(
            404,
            f"The model {str(name)[:200]!r} is not served here. There is "
            f"{settings.names[0]!r}.",
            param="model",
            code="model_not_found",
        )
    return str(name)


def _stream_options(fields: Fields, stream: bool) -> dict[str, bool] | None:
    options = fields.object("stream_options")
    if options is None:
        return None
    if not stream:
        raise invalid("stream_options is given without stream.", "stream_options")
    inner = Fields(options, "stream_options.")
    usage = inner.flag("include_usage")
    inner.without_effect("include_obfuscation")
    inner.end()
    return {"include_usage": usage}


def _prompt(fields: Fields) -> str | list[int]:
    prompt = fields.take("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(
        isinstance(token, int) and not isinstance(token, bool) for token in prompt
    ):
        return prompt
    raise fields.wrong("prompt", prompt, "one text or one list of token ids")


def _template_args(fields: Fields) -> dict[str, Any] | None:
    args = fields.object("chat_template_kwargs")
    for name in args or ():
        if name in RESERVED:
            raise invalid(
                f"chat_template_kwargs holds {name!r}, which no request may set.",
                "chat_template_kwargs",
            )
    return args


def _max_tokens(fields: Fields, settings: Settings) -> int:
    most = settings.limits.max_tokens
    older = fields.whole("max_tokens", None, 1, most)
    newer = fields.whole("max_completion_tokens", None, 1, most)
    if newer is not None:
        return newer
    return settings.defaults.max_tokens if older is None else older


def _sampling(fields: Fields, settings: Settings) -> dict[str, Any]:
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


def _stop(fields: Fields) -> tuple[str, ...]:
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


def _chat_logprobs(fields: Fields) -> int | None:
    wanted = fields.flag("logprobs")
    # -1 is mlx-lm's way of saying none.
    top = fields.whole("top_logprobs", None, -1, MOST_ALTERNATIVES)
    if top is not None and top > 0 and not wanted:
        raise invalid("top_logprobs is given without logprobs: true.", "top_logprobs")
    return max(top or 0, 0) if wanted else None


def _text_logprobs(fields: Fields) -> int | None:
    """Return the number of alternatives, in OpenAI's way or in the chat's."""
    given = fields.take("logprobs")
    if given is None or isinstance(given, bool):
        again = {"logprobs": given, "top_logprobs": fields.take("top_logprobs")}
        return _chat_logprobs(Fields(again))
    return Fields({"logprobs": given}).whole("logprobs", None, 0, MOST_ALTERNATIVES)


def _schema(fields: Fields) -> dict[str, Any] | None:
    given = fields.object("response_format")
    if given is None:
        return None
    inner = Fields(given, "response_format.")
    kind = inner.only("type", "text", "json_object", "json_schema")
    if kind is None:
        raise inner.wrong("type", None, "'text', 'json_object' or 'json_schema'")
    described = inner.object("json_schema")
    inner.end()
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if described is None:
        raise inner.wrong("json_schema", None, "an object with a schema")
    details = Fields(described, "response_format.json_schema.")
    schema = details.object("schema")
    details.without_effect("name", "description", "strict")
    details.end()
    if schema is None:
        raise details.wrong("schema", None, "a JSON schema")
    size = len(json.dumps(schema))
    if size > LARGEST_SCHEMA:
        raise invalid(
            f"The schema has {size} characters, and {LARGEST_SCHEMA} may be.",
            "response_format",
        )
    return schema


def _speculative(fields: Fields, settings: Settings) -> tuple[str | None, int | None]:
    """Return what drafts, and how many tokens at most."""
    given = fields.object("speculative")
    most = settings.limits.draft_tokens
    mlx_lm_length = fields.whole("num_draft_tokens", None, 0, most)
    fields.only("draft_model", "default_model")
    if given is None:
        return None, mlx_lm_length
    inner = Fields(given, "speculative.")
    name = inner.text("draft")
    length = inner.whole("max_draft", mlx_lm_length, 0, most)
    off = inner.flag("off")
    inner.end()
    known = [one for one in (settings.draft, "lookup") if one is not None]
    if name is not None and name not in known:
        raise invalid(
            f"speculative.draft is {name[:200]!r}, and there is "
            f"{' and '.join(repr(one) for one in dict.fromkeys(known))}.",
            "speculative.draft",
        )
    if off and (length or name is not None):
        raise invalid(
            "speculative.off is true, and draft or max_draft ask for drafts. Leave one "
            "of them out.",
            "speculative.off",
        )
    return (None if name == settings.draft else name), 0 if off else length


def _refuse_the_rest(fields: Fields) -> None:
    fields.only("n", 1)
    fields.only("best_of", 1)
    fields.only("echo", False)
    fields.only("modalities", ["text"])
    fields.without_effect(
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
    )
    for name in ("adapters", "suffix", "functions", "function_call", "audio"):
        fields.only(name)
    fields.end()

"""Options of a text: sampling, ends, a schema, drafts, and whether to think."""

import json
from dataclasses import asdict, fields
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import Field

from mlx_speculation.engine.options import StreamKeywords
from mlx_speculation.samplers import Sampling
from mlx_speculation.server.api_errors import ApiError, invalid
from mlx_speculation.server.config import Settings
from mlx_speculation.server.request.models import RequestModel, StrictModel, short
from mlx_speculation.server.request.request import GenerationRequest

SEEDS = 2**64
MOST_ALTERNATIVES = 20
# Each token is compared with every beginning of a stop.
MOST_STOPS, LONGEST_STOP = 16, 500
# The time that a grammar takes grows with the square of this, and all wait for it.
LARGEST_SCHEMA = 1 << 15
# Logits are divided by it, and have to stay finite.
SMALLEST_DIVISOR = 0.01

Share = Annotated[float, Field(ge=0, le=1)]
Whole = Annotated[int, Field(ge=0, le=2**31)]
Count = Annotated[int, Field(ge=1)]
Penalty = Annotated[float, Field(ge=-100, le=100)]
Object = dict[str, Any]


class Speculative(StrictModel):
    """Drafts of one request; none of its fields changes the text."""

    where: ClassVar[str] = "speculative."

    draft: str | None = None  # what the server was started with, or "lookup"
    max_draft: Annotated[int, Field(ge=0)] | None = None
    off: bool = False  # plain decoding
    exact: bool = False  # the same bits, whatever drafts


class TextOptions(RequestModel):
    """Options that the requests of all APIs may have."""

    model: str | None = None
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Share | None = None
    top_k: Whole | None = None
    speculative: Speculative | None = None


class SamplingOptions(TextOptions):
    """Options of OpenAI's older interfaces, with those of mlx-lm's server."""

    min_p: Share | None = None
    xtc_probability: Share | None = None
    xtc_threshold: Annotated[float, Field(ge=0, le=0.5)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0, le=100)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_context_size: Whole | None = None
    presence_context_size: Whole | None = None
    frequency_context_size: Whole | None = None
    logit_bias: dict[str, Penalty] = Field(default_factory=dict)
    seed: Annotated[int, Field(ge=-(2**63), lt=SEEDS)] | None = None
    stop: str | list[str] = Field(default_factory=list)
    num_draft_tokens: Annotated[int, Field(ge=0)] | None = None
    draft_model: Literal["default_model"] | None = None


def generation(
    body: TextOptions,
    settings: Settings,
    options: StreamKeywords,
    *,
    max_tokens: int | None,
    any_model: bool = False,  # whatever the client calls it
    **more: Any,  # further fields of the request
) -> GenerationRequest:
    """Return a request: the options of its text that all APIs have, and its fields."""
    if not any_model:
        _check_model(body.model, settings)
    if more.get("schema") is not None and more.get("calls") is not None:
        raise invalid(
            "response_format asks for JSON, and tool_choice for a call. Leave one of "
            "them out.",
            "tool_choice",
        )
    drafted, draft, exact = _drafts(body, settings)
    given = {**options, **drafted, "max_tokens": max_tokens}
    given = {name: value for name, value in given.items() if value is not None}
    return GenerationRequest(
        stream=body.stream,
        sampling=_sampling(body, settings),
        options=cast("StreamKeywords", given),
        draft=draft,
        exact=exact,
        **more,
    )


def _sampling(body: TextOptions, settings: Settings) -> Sampling:
    names = {one.name for one in fields(Sampling)} & type(body).model_fields.keys()
    values = {name: getattr(body, name) for name in names}
    given = {name: value for name, value in values.items() if value is not None}
    if 0 < (divisor := given.get("repetition_penalty", 0)) < SMALLEST_DIVISOR:
        raise invalid(
            f"repetition_penalty is {divisor}, and 0 or at least {SMALLEST_DIVISOR:g} "
            "is needed.",
            "repetition_penalty",
        )
    given["logit_bias"] = _logit_bias(given.get("logit_bias", {}))
    if "seed" in given:
        given["seed"] %= SEEDS  # negative ones count from the top
    defaults = asdict(settings.defaults)
    del defaults["max_tokens"]
    return Sampling(**{**defaults, **given})


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    for name in given:
        if not (name.isascii() and name.isdigit() and len(name) < 10):
            raise invalid(
                f"logit_bias is {short(name)}, and token ids as names are needed.",
                "logit_bias",
            )
    return {int(name): value for name, value in given.items()}


def stops(given: str | list[str] | None, field: str = "stop") -> tuple[str, ...]:
    """Return the texts that end a text."""
    texts = [given] if isinstance(given, str) else given or []
    longest = max(map(len, texts), default=0)
    if not all(texts) or len(texts) > MOST_STOPS or longest > LONGEST_STOP:
        raise invalid(
            f"{field} holds {len(texts)} texts of up to {longest} characters, and "
            f"{MOST_STOPS} of up to {LONGEST_STOP} may be, none empty.",
            field,
        )
    return tuple(texts)


def _check_model(name: str | None, settings: Settings) -> None:
    """Raise where a model is asked for that is not served."""
    if name not in (None, "default_model", *settings.names):
        raise ApiError(
            404,
            f"The model {str(name)[:200]!r} is not served here. There is "
            f"{settings.names[0]!r}.",
            param="model",
            code="model_not_found",
        )


def at_most(value: int | None, most: int, field: str, option: str) -> None:
    """Raise where a number is above a limit of the server; 0: no limit."""
    if value is not None and most and value > most:
        raise invalid(
            f"{field} is {short(value)}, and {most} may be. Ask for less, or start the "
            f"server with a larger --{option}.",
            field,
        )


def _drafts(
    body: TextOptions, settings: Settings
) -> tuple[StreamKeywords, str | None, bool]:
    """Return options of the drafts, the draft's name, and whether it is exact mode."""
    given, most = body.speculative, settings.limits.draft_tokens
    length = getattr(body, "num_draft_tokens", None)
    at_most(length, most or -1, "num_draft_tokens", "max-draft")
    if given is None:
        return {"draft_length": length}, None, False
    at_most(given.max_draft, most or -1, "speculative.max_draft", "max-draft")
    names = [one for one in (settings.draft, "lookup") if one is not None]
    name = given.draft
    if name is not None and name not in names:
        raise invalid(
            f"speculative.draft is {name[:200]!r}, and there is "
            f"{' and '.join(repr(one) for one in dict.fromkeys(names))}.",
            "speculative.draft",
        )
    if given.off and (length or given.max_draft or name is not None):
        raise invalid(
            "speculative.off is true, and draft, max_draft or num_draft_tokens asks "
            "for drafts. Leave one of them out.",
            "speculative.off",
        )
    length = 0 if given.off else length
    options: StreamKeywords = {"draft_length": length, "max_draft": given.max_draft}
    return options, None if name == settings.draft else name, given.exact


class NamedSchema(StrictModel):
    """A JSON schema with its name."""

    where: ClassVar[str] = "response_format.json_schema."
    no_effect: ClassVar[frozenset[str]] = frozenset(
        ("name", "description", "strict", "schema")
    )

    json_schema: Object = Field(alias="schema")

    @classmethod
    def check_names(cls, values: dict[str, Any]) -> None:
        """Say where a schema belongs, then refuse unknown names."""
        if "schema" not in values:
            field = f"{cls.where}schema"
            raise invalid(f"{field} is None, and a JSON schema is needed.", field)
        super().check_names(values)


class ResponseFormat(StrictModel):
    """The form that the text has to have."""

    where: ClassVar[str] = "response_format."
    advice: ClassVar[str] = "A schema is given as response_format.json_schema.schema."

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class TextFormat(RequestModel):
    """The form of a text in APIs that have the schema beside its type."""

    type: str = "text"
    json_schema: Object | None = Field(None, alias="schema")


def schema_of(given: ResponseFormat | TextFormat | None, field: str) -> Object | None:
    """Return the JSON schema that a text has to fit.

    Raises:
        ApiError: there is none, or it is too large.
    """
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return {"type": "object"}
    schema = given.json_schema
    if isinstance(schema, NamedSchema):
        schema = schema.json_schema
    if schema is None or given.type != "json_schema":
        raise invalid(f"{field} has no JSON schema, and one is needed.", field)
    size = len(json.dumps(schema))
    if size > LARGEST_SCHEMA:
        raise invalid(
            f"The schema has {size} characters, and {LARGEST_SCHEMA} may be.", field
        )
    return schema


class Switch(RequestModel):
    """Thinking, as the interfaces switch it."""

    type: str | None = None
    enabled: bool | None = None
    effort: str | None = None
    budget_tokens: Annotated[int, Field(ge=0)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None


def thinking(
    *switches: Switch | None,
    on: bool | None = None,
    effort: str | None = None,
    budget: int | None = None,
) -> tuple[Object, int | None]:
    """Return keywords for the chat template, and the budget, of all switches there are.

    Of keywords a template takes those that it knows.
    """
    for switch in filter(None, switches):
        effort = switch.effort or effort
        on = switch.enabled if on is None else on
        if on is None and switch.type is not None:
            on = switch.type != "disabled"
        budgets = (budget, switch.budget_tokens, switch.max_tokens)
        budget = next((each for each in budgets if each is not None), None)
    if on is None and (effort == "none" or budget == 0):
        on = False
    args: Object = {} if on is None else {"enable_thinking": on}
    if effort is not None and effort != "none":
        args["reasoning_effort"] = effort
    return args, budget if budget and on is not False else None

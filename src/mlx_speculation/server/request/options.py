"""Requests and options of all APIs: sampling, stop texts, schema, drafts, thinking."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import AfterValidator, Field, Strict, model_validator

from mlx_speculation.engine.options import StreamKeywords
from mlx_speculation.samplers import Sampling
from mlx_speculation.server.api_errors import ApiError, invalid
from mlx_speculation.server.config import Settings
from mlx_speculation.server.request.models import (
    Object,
    RequestModel,
    StrictModel,
    at_most,
)
from mlx_speculation.server.request.tools import Function

SEEDS = 2**64
# Each token is compared with every beginning of a stop text.
MOST_STOPS, LONGEST_STOP = 16, 500
# A grammar takes time that grows with the square of its size, and delays all requests.
LARGEST_SCHEMA = 1 << 15
# Logits are divided by a repetition penalty, and have to stay finite.
SMALLEST_DIVISOR = 0.01


def _divisor(value: float) -> float:
    if 0 < value < SMALLEST_DIVISOR:
        raise ValueError(f"it must be 0 or at least {SMALLEST_DIVISOR:g}")
    return value


def _stops(given: str | list[str]) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    longest = max(map(len, texts), default=0)
    if not all(texts) or len(texts) > MOST_STOPS or longest > LONGEST_STOP:
        raise ValueError(
            f"up to {MOST_STOPS} texts of 1 to {LONGEST_STOP} characters are allowed"
        )
    return texts


def _small(schema: Object) -> Object:
    size = len(json.dumps(schema))
    if size > LARGEST_SCHEMA:
        raise ValueError(
            f"it has {size} characters, but at most {LARGEST_SCHEMA} are allowed"
        )
    return schema


Share = Annotated[float, Field(ge=0, le=1)]
Whole = Annotated[int, Field(ge=0, le=2**31)]
Natural = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Penalty = Annotated[float, Field(ge=-100, le=100)]
Divisor = Annotated[float, Field(ge=0, le=100), AfterValidator(_divisor)]
TokenId = Annotated[int, Strict(False), Field(ge=0, le=2**31)]
Stops = Annotated[str | list[str], AfterValidator(_stops)]
Schema = Annotated[Object, AfterValidator(_small)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """Messages of a chat, before they are fitted to a chat template.

    Roles are system (of the first message only), user, assistant and tool. A content is
    a text, or with images a list of parts. Arguments of tool calls are objects.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()  # shown to the model, in OpenAI's form
    # Not listed by the template, but described where a message refers to them
    deferred: tuple[dict[str, Any], ...] = ()
    template_args: dict[str, Any] = field(default_factory=dict)
    images: tuple[bytes, ...] = ()  # files, ordered as the parts


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request with checked fields."""

    chat: Chat | None = None  # None: `prompts` are continued
    prompts: tuple[str | list[int], ...] = ()  # of a completion, texts or token ids
    count: int = 1  # texts for each prompt
    stream: bool = False  # whether the answer comes in pieces
    sampling: Sampling
    # Options that the request gives. Without max_tokens, only the context limits the
    # length of a text.
    options: StreamKeywords = field(default_factory=StreamKeywords)
    schema: dict[str, Any] | None = None  # the text has to fit it; None: any text
    # Functions, one of which has to be called; None: no call is needed
    calls: Sequence[dict[str, Any]] | None = None
    most_calls: int | None = None  # the maximum number of tool calls; None: any
    thinking_budget: int | None = None  # maximum tokens of thinking; None: any number
    draft: str | None = None  # name of the draft; None: that of the server
    exact: bool = False  # exact mode: drafts do not decide near-ties


class Speculative(StrictModel):
    """Options of drafting for one request; none changes the text."""

    where: ClassVar[str] = "speculative."

    draft: str | None = None  # the draft of the server, or "lookup"
    max_draft: Natural | None = None
    off: bool = False  # plain decoding
    exact: bool = False  # exact mode: drafts do not decide near-ties


class TextOptions(RequestModel):
    """Options that the requests of all APIs may have."""

    lengths: ClassVar[Sequence[str]] = ()  # length fields; the first that is set wins
    # True: any model name is accepted, and a length above the limit is lowered to it
    any_model: ClassVar[bool] = False

    model: str | None = None
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Share | None = None
    top_k: Whole | None = None
    speculative: Speculative = Speculative()

    def request(self, settings: Settings) -> GenerationRequest:
        """Check the fields, and return them as a `GenerationRequest`."""
        raise NotImplementedError


class SamplingOptions(TextOptions):
    """Options of OpenAI's older interfaces, with those of mlx-lm's server."""

    min_p: Share | None = None
    xtc_probability: Share | None = None
    xtc_threshold: Annotated[float, Field(ge=0, le=0.5)] | None = None
    repetition_penalty: Divisor | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_context_size: Whole | None = None
    presence_context_size: Whole | None = None
    frequency_context_size: Whole | None = None
    logit_bias: dict[TokenId, Penalty] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=SEEDS)] | None = None
    num_draft_tokens: Natural | None = None
    draft_model: Literal["default_model"] | None = None
    stop: Stops | None = None


class TextFormat(RequestModel):
    """The format that a text has to have."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: Schema | None = Field(default=None, alias="schema")

    @model_validator(mode="after")
    def _has_schema(self) -> "TextFormat":
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("type 'json_schema' needs a schema")
        return self

    @property
    def wanted(self) -> Object | None:
        """The JSON schema that a text has to fit; None: any text is allowed."""
        known = {"json_object": {"type": "object"}, "json_schema": self.json_schema}
        return known.get(self.type)


class FormatConfig(RequestModel):
    """Format of the text, and effort of reasoning."""

    format: TextFormat = TextFormat()
    effort: str | None = None


class Switch(RequestModel):
    """Fields by which APIs switch thinking on and off."""

    type: str | None = None
    enabled: bool | None = None
    effort: str | None = None
    budget_tokens: Natural | None = None
    max_tokens: Natural | None = None


def generation(
    body: TextOptions,
    settings: Settings,
    *,
    default_length: int = 0,  # if the body gives none; 0: up to the limits
    chat: Chat | None = None,
    calls: Sequence[Function] | None = None,
    form: TextFormat | None = None,
    parallel: bool = True,
    logprobs: int | None = None,  # the number of alternatives; None: no logprobs
    prediction: str | None = None,
    **more: Any,  # further fields of `GenerationRequest`
) -> GenerationRequest:
    """Return a request with the options that all APIs have, and further fields."""
    if not body.any_model and body.model not in (None, "default_model"):
        check_model(body.model, settings)
    schema = None if form is None else form.wanted
    if schema is not None and calls is not None:
        raise invalid(
            "response_format asks for JSON, and tool_choice for a call. Leave one of "
            "them out.",
            "tool_choice",
        )
    drafts = body.speculative
    given = {
        "draft_length": _draft_length(body, settings),
        "max_draft": drafts.max_draft,
        "stop": getattr(body, "stop", None),
        "max_tokens": _length(body, settings, default_length),
        "logprobs": logprobs,
        "prediction": prediction,
    }
    given = {name: value for name, value in given.items() if value is not None}
    return GenerationRequest(
        stream=body.stream,
        sampling=_sampling(body, settings),
        options=cast("StreamKeywords", given),
        chat=chat,
        schema=schema,
        calls=calls,
        most_calls=None if parallel else 1,
        draft=None if drafts.draft == settings.draft else drafts.draft,
        exact=drafts.exact,
        **more,
    )


def _sampling(body: TextOptions, settings: Settings) -> Sampling:
    names = {one.name for one in fields(Sampling)}
    given = body.model_dump(include=names, exclude_none=True)
    if "seed" in given:
        given["seed"] %= SEEDS  # negative seeds wrap around
    defaults = asdict(settings.defaults)
    del defaults["max_tokens"]
    return Sampling(**{**defaults, **given})


def check_model(name: str, settings: Settings) -> None:
    """Raise ApiError if a name is not one of the model's."""
    if name not in settings.names:
        raise ApiError(
            404,
            f"The model {name[:200]!r} is not served here. This server has "
            f"{settings.names[0]!r}.",
            param="model",
            code="model_not_found",
        )


def _length(body: TextOptions, settings: Settings, default: int) -> int | None:
    """Return the maximum length of a text; None: only the context limits it."""
    given = {name: getattr(body, name) for name in body.lengths}
    most = settings.limits.max_tokens or None
    if not body.any_model:
        for name, value in given.items():
            at_most(value, most, name, "max-tokens-limit")
    length: int | None = next(filter(None, given.values()), None)
    if length is None:
        return default or most
    return min(length, most or length)


def _draft_length(body: TextOptions, settings: Settings) -> int | None:
    """Check options of drafts, and return the draft length; None: the server's."""
    most, drafts = settings.limits.draft_tokens, body.speculative
    length, name = getattr(body, "num_draft_tokens", None), drafts.draft
    at_most(length, most, "num_draft_tokens", "max-draft")
    at_most(drafts.max_draft, most, "speculative.max_draft", "max-draft")
    known = dict.fromkeys(one for one in (settings.draft, "lookup") if one is not None)
    if name is not None and name not in known:
        raise invalid(
            f"speculative.draft is {name[:200]!r}, but this server has "
            f"{' and '.join(map(repr, known))}.",
            "speculative.draft",
        )
    if drafts.off and (length or drafts.max_draft or name is not None):
        raise invalid(
            "speculative.off is true, and draft, max_draft or num_draft_tokens asks "
            "for drafts. Leave one of them out.",
            "speculative.off",
        )
    return 0 if drafts.off else length


def thinking(
    *switches: Switch | None,
    on: bool | None = None,
    effort: str | None = None,
    budget: int | None = None,
) -> tuple[Object, int | None]:
    """Return keywords for the chat template, and the budget of thinking if any."""
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
    if effort not in (None, "none"):
        args["reasoning_effort"] = effort
    return args, budget if budget and on is not False else None

"""What a request asks for, once every field has been checked.

Fields that would change the text and are not offered are refused, not passed over; so
is every name that is not known.
"""

from dataclasses import dataclass, replace
from typing import Any

from mlx_speculation.samplers import derived_seed
from mlx_speculation.server.api_errors import ApiError, invalid
from mlx_speculation.server.config import Settings
from mlx_speculation.server.request import options
from mlx_speculation.server.request.chat_messages import checked_messages, checked_tools
from mlx_speculation.server.request.fields import Fields

# Keywords of a chat template that are not the template's: a client's own template could
# run for ever.
NOT_OFFERED = {  # fields of OpenAI's and mlx-lm's, and what to do instead
    "adapters": "Start the server with --adapter-path.",
    "suffix": "Leave it out: a text is continued at its end alone.",
    "functions": "Name them in tools.",
    "function_call": "Choose with tool_choice.",
    "audio": "Leave it out: the answer is text.",
}
RESERVED = frozenset(
    (
        *("add_generation_prompt", "chat_template", "continue_final_message"),
        *("conversation", "documents", "max_length", "messages", "padding"),
        *("return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize"),
        *("tokenizer_kwargs", "tools", "truncation"),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRequest:
    """One request, every field of it checked."""

    chat: bool  # whether it came to the chat's path
    body: dict[str, Any]  # what mlx-lm's server has to know of it
    # Of a completion, texts or token ids; empty: a chat.
    prompts: tuple[str | list[int], ...]
    count: int  # texts for each prompt
    template_args: dict[str, Any] | None  # keywords for the chat template
    stream: bool  # whether the answer comes in pieces
    max_tokens: int  # of the text
    sampling: dict[str, Any]  # the options of `Sampling`
    stop: tuple[str, ...]  # texts that end it
    # How many alternatives to report beside each token; None: nothing.
    logprobs: int | None
    schema: dict[str, Any] | None  # that the text has to fit; None: any text
    # The functions of which one has to be called; None: the model is free.
    calls: tuple[dict[str, Any], ...] | None
    draft: str | None  # the name of what drafts; None: the server's own
    draft_length: int | None  # tokens drafted in each round; None: as many as pay
    # Tokens drafted in a round at most; None: no limit of its own.
    max_draft: int | None
    exact: bool = False  # whether no draft may change a bit
    most_calls: int | None = None  # tool calls of an answer; None: any number
    # Of a chat with images: its messages with their parts; empty: it has none
    placed: tuple[dict[str, Any], ...] = ()
    # The files of its images; once they are opened, pictures
    images: tuple[Any, ...] = ()

    @property
    def prompt(self) -> str | list[int] | None:
        """The prompt of one text of a completion; None: a chat."""
        return self.prompts[0] if self.prompts else None

    def texts(self) -> list["CheckedRequest"]:
        """Return a request for each text, in the order of the answer's choices.

        With a seed the first text is that of the seed alone.
        """
        prompts = [self.prompts[i : i + 1] for i in range(max(1, len(self.prompts)))]
        seed, found = self.sampling["seed"], []
        for index, prompt in enumerate(p for p in prompts for _ in range(self.count)):
            own = None if seed is None else derived_seed(seed, index)
            sampling = {**self.sampling, "seed": own}
            found.append(replace(self, prompts=prompt, count=1, sampling=sampling))
        return found


def read_request(
    given: dict[str, Any], settings: Settings, *, chat: bool
) -> CheckedRequest:
    """Check a request.

    Raises:
        ApiError: names the field that is wrong.
    """
    fields = Fields(given)
    body: dict[str, Any] = {"model": _model(fields, settings)}
    body["stream"] = stream = fields.flag("stream")
    body["stream_options"] = _stream_options(fields, stream)
    prompts: tuple[str | list[int], ...] = ()
    template_args = calls = messages = None
    parallel = fields.flag("parallel_tool_calls", True)
    if chat:
        messages = checked_messages(fields, settings)
        body["messages"] = messages.texts
        tools = checked_tools(fields)
        body["tools"], calls = tools.offered, tools.needed
        template_args = _template_args(fields)
    else:
        prompts = _prompts(fields)
        body["prompt"] = ""
    draft, length, max_draft, exact = options.speculative(fields, settings)
    checked = CheckedRequest(
        chat=chat,
        body=body,
        prompts=prompts,
        count=_count(fields, max(1, len(prompts)), settings),
        template_args=template_args,
        stream=stream,
        max_tokens=_max_tokens(fields, settings),
        sampling=options.sampling(fields, settings),
        stop=options.stop(fields),
        logprobs=options.chat_logprobs(fields)
        if chat
        else options.text_logprobs(fields),
        schema=options.schema(fields, calls=calls is not None),
        calls=calls,
        draft=draft,
        draft_length=length,
        max_draft=max_draft,
        exact=exact,
        most_calls=None if parallel else 1,
        placed=() if messages is None else messages.placed,
        images=() if messages is None else messages.images,
    )
    _refuse_the_rest(fields)
    return checked


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
    given = fields.object("stream_options")
    if given is None:
        return None
    if not stream:
        raise invalid("stream_options is given without stream.", "stream_options")
    inner = Fields(given, "stream_options.")
    usage = inner.flag("include_usage")
    inner.without_effect("include_obfuscation")
    inner.end()
    return {"include_usage": usage}


def _prompts(fields: Fields) -> tuple[str | list[int], ...]:
    """Return one prompt, or several: texts, or lists of token ids."""
    given = fields.take("prompt")
    several = isinstance(given, list) and given and _is_prompt(given[0])
    prompts = given if several else [given]
    if all(map(_is_prompt, prompts)):
        return tuple(prompts)
    raise fields.wrong(
        "prompt", given, "a text, a list of token ids, or a list of them"
    )


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list)
        and all(isinstance(one, int) and not isinstance(one, bool) for one in value)
    )


def _count(fields: Fields, prompts: int, settings: Settings) -> int:
    """Return how many texts each prompt gets; all of them are rows at once."""
    count = fields.whole("n", 1, 1) or 1
    if count * prompts > settings.max_rows:
        raise invalid(
            f"{count * prompts} texts are asked for at once, and {settings.max_rows} "
            "may be. Ask for fewer, or start the server with a larger --max-rows.",
            "n" if count > 1 else "prompt",
        )
    return count


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
    most, option = settings.limits.max_tokens, "max-tokens-limit"
    older = fields.whole("max_tokens", None, 1, most, option)
    newer = fields.whole("max_completion_tokens", None, 1, most, option)
    if newer is not None:
        return newer
    return settings.defaults.max_tokens if older is None else older


def _refuse_the_rest(fields: Fields) -> None:
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
    )
    fields.ignore("verbosity", "prediction", "reasoning_effort")
    for name, advice in NOT_OFFERED.items():
        fields.refuse(name, advice)
    fields.end()

"""Legacy completions, and what Chat Completions share with them."""

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictBool

from mlx_speculation import __version__
from mlx_speculation.server.answer_parts import Part, Reasoning, Text
from mlx_speculation.server.api_errors import ApiError, invalid
from mlx_speculation.server.apis.base import Face, speculative, summed
from mlx_speculation.server.config import Settings
from mlx_speculation.server.job import Job, Token
from mlx_speculation.server.request.models import Object, StrictModel, at_most
from mlx_speculation.server.request.options import (
    Count,
    GenerationRequest,
    SamplingOptions,
    TextFormat,
    generation,
)

# Length of a continued text, which has no end of turn at which the model would stop.
TEXT_LENGTH = 512
FINGERPRINT = f"mlx-speculation-{__version__}"
Alternatives = Annotated[int, Field(ge=-1, le=20)]  # -1: none, as in mlx-lm
NOT_OFFERED = {  # fields of OpenAI's and mlx-lm's servers, and what to do instead
    "adapters": "Start the server with --adapter-path.",
    "suffix": "Leave it out: a text is continued at its end alone.",
    "functions": "Name them in tools.",
    "function_call": "Choose with tool_choice.",
    "audio": "Leave it out: the answer is text.",
}
NO_EFFECT = frozenset(
    (
        *("user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
        *("verbosity", "cache_control", "moderation"),
        *("include_reasoning", "reasoning_format", "session_id", "provider", "usage"),
        *("cache_prompt", "parse_tool_calls", "web_search_options"),
    )
)


class StreamOptions(StrictModel):
    """Options of a stream."""

    where: ClassVar[str] = "stream_options."
    no_effect: ClassVar[frozenset[str]] = frozenset(("include_obfuscation",))

    include_usage: bool = False


class ResponseFormat(StrictModel, TextFormat):
    """The format of a text; `json_schema` is an object with a schema and a name."""

    where: ClassVar[str] = "response_format."
    advice: ClassVar[str] = "Pass a schema as response_format.json_schema.schema."

    @classmethod
    def check_names(cls, values: Object) -> None:
        """Take the schema out of `json_schema`."""
        named = values.pop("json_schema", None)
        super().check_names(values)
        if named is not None:
            if not isinstance(named, Mapping) or named.get("schema") is None:
                raise ValueError("json_schema must be an object with a schema")
            values["schema"] = named["schema"]


class OpenAIBody(StrictModel, SamplingOptions):
    """Fields that chats and completions share."""

    not_offered: ClassVar[dict[str, str]] = NOT_OFFERED
    no_effect: ClassVar[frozenset[str]] = NO_EFFECT
    lengths: ClassVar[Sequence[str]] = ("max_completion_tokens", "max_tokens")

    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: Count = 1
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    modalities: list[Literal["text"]] | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    parallel_tool_calls: bool = True
    logprobs: StrictBool | Annotated[Alternatives, Field(ge=0)] | None = None
    top_logprobs: Alternatives | None = None

    def generation(
        self, settings: Settings, prompts: Sequence[str | list[int]] = (), **more: Any
    ) -> GenerationRequest:
        """Return the request; `more` is passed on to the function `generation`."""
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options is given without stream.", "stream_options")
        count, param = self.n * max(1, len(prompts)), "n" if self.n > 1 else "prompt"
        texts = "The number of texts at once"
        at_most(count, settings.max_rows, param, "max-rows", shown=texts)
        alternatives = self.logprobs
        if alternatives is None or isinstance(alternatives, bool):
            top = max(self.top_logprobs or 0, 0)
            if top and not alternatives:
                raise invalid(
                    "top_logprobs is given without logprobs: true.", "top_logprobs"
                )
            alternatives = top if alternatives else None
        return generation(
            self,
            settings,
            logprobs=alternatives,
            form=self.response_format,
            parallel=self.parallel_tool_calls,
            prompts=tuple(prompts),
            count=self.n,
            **more,
        )


class CompletionBody(OpenAIBody):
    """A request to continue texts."""

    prompt: str | list[int] | list[str] | list[list[int]]

    def request(self, settings: Settings) -> GenerationRequest:
        """Check the fields, and return them as a `GenerationRequest`."""
        prompts: Any = self.prompt
        if not isinstance(prompts, list) or not prompts or isinstance(prompts[0], int):
            prompts = [prompts]
        length = settings.defaults.max_tokens or TEXT_LENGTH
        return self.generation(settings, prompts, default_length=length)


class CompletionFace(Face):
    """Legacy completions, from which chats differ in a few methods."""

    prefix = "cmpl"
    kinds = ("text_completion", "text_completion")  # `object` of an answer, a chunk
    fields = ("text", "text")  # the field of the text in an answer, in a chunk
    last: ClassVar[Any] = ""  # the piece in the last chunk of a text

    def __init__(self, body: OpenAIBody, settings: Settings) -> None:
        super().__init__(body, settings)
        self._counts = bool(body.stream_options and body.stream_options.include_usage)
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": settings.names[0],
            "system_fingerprint": FINGERPRINT,
        }
        self._choices: list[Object] = []  # the texts that have ended
        self._jobs: list[Job] = []  # their jobs
        self._parts: list[Part] = []  # of the text that has not ended
        self._tokens: list[Token] = []
        self._sent = 0  # the number of these tokens that were sent

    def reading(self, tokens: int, of: int) -> None:
        """Send a comment, as mlx-lm's server does."""
        self._unsent.append(f": keepalive {tokens}/{of}\n\n".encode())

    def keep_alive(self) -> None:
        """Send a comment, since clients would take an object for a chunk."""
        self._unsent.append(b": keepalive\n\n")

    def parts(self, choice: int, parts: list[Part], tokens: Sequence[Token]) -> None:
        """Send new parts of a text."""
        self._tokens += tokens
        for part in parts:
            self._piece(choice, part)
            self._parts.append(part)

    def end_text(self, choice: int, job: Job) -> None:
        """Send the reason for the end of a text."""
        reason = self._reason(job)
        self._chunk(choice, self.last, reason)
        whole = {self.fields[0]: self._whole(), "finish_reason": reason}
        self._choices.append(self._choice(choice, self._tokens, whole))
        self._jobs.append(job)
        self._parts, self._tokens, self._sent = [], [], 0

    def close(self) -> None:
        """Send the usage of all texts if asked for, and end the stream."""
        usage = {"usage": self._usage()}
        self.answer = {**self._packet(self.kinds[0], self._choices), **usage}
        if self._counts:
            self._send({**self._packet(self.kinds[1], []), **usage})
        self._unsent.append(b"data: [DONE]\n\n")

    def failed(self, error: ApiError) -> None:
        """End with an error."""
        self._send(error.body_for())

    def _piece(self, choice: int, part: Part) -> None:
        """Send a part in chunks."""
        if isinstance(part, Text):
            self._chunk(choice, part.text)

    def _whole(self) -> Any:
        return self._said(Text)

    def _logprobs(self, tokens: Sequence[Token]) -> Object:
        return {
            "tokens": [each.text for each in tokens],
            "token_ids": [each.id for each in tokens],
            "token_logprobs": [each.logprob for each in tokens],
            "top_logprobs": [_by_text(each.top) for each in tokens],
            "text_offset": [each.start for each in tokens],
        }

    def _reason(self, job: Job) -> str:
        return str(job.result.finish_reason)

    def _said(self, kind: type[Text | Reasoning]) -> str:
        return "".join(part.text for part in self._parts if isinstance(part, kind))

    def _chunk(self, choice: int, piece: Any, reason: str | None = None) -> None:
        """Send a chunk, with the probabilities that have not been sent yet."""
        tokens, self._sent = self._tokens[self._sent :], len(self._tokens)
        said = {self.fields[1]: piece, "finish_reason": reason}
        self._send(self._packet(self.kinds[1], [self._choice(choice, tokens, said)]))

    def _choice(self, index: int, tokens: Sequence[Token], said: Object) -> Object:
        logprobs = self._logprobs(tokens) if tokens else None
        return {"index": index, **said, "logprobs": logprobs}

    def _packet(self, kind: str, choices: list[Object]) -> Object:
        packet = {**self._head, "object": kind, "choices": choices}
        # If usage was asked for, it is null in all chunks but the last.
        return {**packet, "usage": None} if self._counts else packet

    def _usage(self) -> Object:
        results = [each.result for each in self._jobs]
        drafts = summed(results)
        # Each prompt is counted once: only the first of its texts reads it.
        readers = self._jobs[:: self.request.count]
        cached = sum(each.result.stats.reused for each in readers)
        prompt = sum(each.prompt_tokens for each in readers)
        tokens = sum(len(each.tokens) for each in results)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {
                "reasoning_tokens": sum(each.parser.reasoning for each in self._jobs),
                "accepted_prediction_tokens": drafts.accepted,
                "rejected_prediction_tokens": drafts.drafted - drafts.accepted,
            },
            "speculative": speculative(results, self._draft),
        }


def _by_text(top: Sequence[Token]) -> dict[str, float]:
    """Return the log-probabilities by token text; of equal texts, the first one's."""
    values: dict[str, float] = {}
    for one in top:
        values.setdefault(one.text, one.logprob)
    return values

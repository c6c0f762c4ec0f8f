"""Legacy completions, which continue texts or lists of token ids."""

from collections.abc import Iterable, Sequence
from typing import Any

from mlx_speculation.server.answer_parts import Part, Text
from mlx_speculation.server.apis.base import Ending
from mlx_speculation.server.apis.openai import (
    OpenAIBody,
    OpenAIFace,
    openai_request,
)
from mlx_speculation.server.config import Settings
from mlx_speculation.server.job import Alternative, Token
from mlx_speculation.server.request import GenerationRequest

# Length if neither the request nor --max-tokens gives one: a text has no end of turn at
# which the model would stop.
LENGTH = 512


class CompletionBody(OpenAIBody):
    """A request to continue texts."""

    prompt: str | list[int] | list[str] | list[list[int]]


def completion_request(body: CompletionBody, settings: Settings) -> GenerationRequest:
    """Check a request to continue texts, and return it in the common form."""
    prompts: Any = body.prompt
    if not isinstance(prompts, list) or not prompts or isinstance(prompts[0], int):
        prompts = [prompts]
    length = settings.defaults.max_tokens or LENGTH
    return openai_request(body, settings, prompts=prompts, default_length=length)


class CompletionFace(OpenAIFace):
    """Legacy completions."""

    prefix = "cmpl"
    kinds = ("text_completion", "text_completion")
    fields = ("text", "text")

    def __init__(self, body: CompletionBody, settings: Settings) -> None:
        super().__init__(body, completion_request(body, settings), settings)

    def end_text(self, choice: int, ending: Ending) -> Iterable[bytes]:
        """Send the reason for the end of a text."""
        yield self._chunk(choice, "", self._reason(ending))

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not tokens:
            return None
        return {
            "tokens": [each.alternative.text for each in tokens],
            "token_ids": [each.alternative.id for each in tokens],
            "token_logprobs": [each.alternative.value for each in tokens],
            "top_logprobs": [_by_text(each.top) for each in tokens],
            "text_offset": [each.start for each in tokens],
        }

    def _pieces(self, parts: Sequence[Part]) -> Iterable[str]:
        return [self._whole(parts)] if parts else ()

    def _whole(self, parts: Sequence[Part]) -> str:
        return "".join(part.text for part in parts if isinstance(part, Text))


def _by_text(top: Sequence[Alternative]) -> dict[str, float]:
    """Return the log-probability of each text: that of its most probable token."""
    values: dict[str, float] = {}
    for one in top:
        values.setdefault(one.text, one.value)
    return values

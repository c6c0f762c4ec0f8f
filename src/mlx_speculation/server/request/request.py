"""One request in the form that all APIs share."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_speculation.engine.options import StreamKeywords
from mlx_speculation.samplers import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """Messages of a chat, before they are fitted to a chat template.

    Roles are system (of the first message only), user, assistant and tool. A content is
    a text, or with images a list of parts. Arguments of tool calls are objects.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()  # shown to the model, in OpenAI's form
    deferred: tuple[dict[str, Any], ...] = ()  # described in a message
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
    # Options that the request gives. Without max_tokens only the context is a limit.
    options: StreamKeywords = field(default_factory=StreamKeywords)
    schema: dict[str, Any] | None = None  # the text has to fit it; None: any text
    calls: Sequence[dict[str, Any]] | None = None  # one is needed; None: no call is
    most_calls: int | None = None  # the maximum number of tool calls; None: any
    thinking_budget: int | None = None  # maximum tokens of thinking; None: any number
    draft: str | None = None  # name of the draft; None: that of the server
    exact: bool = False  # exact mode: no draft may change a bit

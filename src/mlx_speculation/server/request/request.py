"""One request in the form that all APIs share."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_speculation.engine.options import StreamKeywords
from mlx_speculation.samplers import Sampling, derived_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """Messages of a chat, before they are fitted to a chat template.

    Roles are system (of the first message only), user, assistant and tool. A content is
    a text, or with images a list of text and image parts. Arguments of tool calls are
    objects.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()  # shown to the model, in OpenAI's form
    # Further tools, which are described in a message.
    deferred: tuple[dict[str, Any], ...] = ()
    template_args: dict[str, Any] = field(default_factory=dict)
    # The images in the order of their parts: bytes of files, decoded by `opened`.
    images: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request with checked fields."""

    chat: Chat | None = None  # None: `prompts` are continued
    prompts: tuple[str | list[int], ...] = ()  # of a completion, texts or token ids
    count: int = 1  # texts for each prompt
    stream: bool = False  # whether the answer comes in pieces
    sampling: Sampling
    # Other options of the stream that the request gives. Without max_tokens only the
    # context limits the text.
    options: StreamKeywords = field(default_factory=StreamKeywords)
    schema: dict[str, Any] | None = None  # the text has to fit it; None: any text
    # The functions of which one has to be called; None: no call is needed.
    calls: Sequence[dict[str, Any]] | None = None
    most_calls: int | None = None  # the maximum number of tool calls; None: any
    thinking_budget: int | None = None  # maximum tokens of thinking; None: any number
    draft: str | None = None  # name of the draft; None: that of the server
    exact: bool = False  # exact mode: no draft may change a bit

    @property
    def prompt(self) -> str | list[int] | None:
        """The prompt of one text of a completion; None: a chat."""
        return self.prompts[0] if self.prompts else None

    @property
    def constrained(self) -> str:
        """The name of the field that constrains the text; empty: none does."""
        if self.calls is not None:
            return "tool_choice"
        return "" if self.schema is None else "response_format"

    def texts(self) -> list["GenerationRequest"]:
        """Return a request for each text, in the order of the answer's choices.

        The first text has the request's seed, from which the later seeds derive.
        """
        prompts = [self.prompts[i : i + 1] for i in range(max(1, len(self.prompts)))]
        seed, requests = self.sampling.seed, []
        for index, prompt in enumerate(p for p in prompts for _ in range(self.count)):
            own_seed = None if seed is None else derived_seed(seed, index)
            sampling = replace(self.sampling, seed=own_seed)
            requests.append(replace(self, prompts=prompt, count=1, sampling=sampling))
        return requests

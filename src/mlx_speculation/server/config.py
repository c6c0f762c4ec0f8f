"""What a server is started with. Knows no HTTP and no models."""

from dataclasses import dataclass, field
from typing import Any

from mlx_speculation.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most that a client may ask for.

    Attributes:
        body_bytes: of a request.
        prompt_tokens: of a prompt.
        max_tokens: of a text.
        draft_tokens: of a draft that a request may ask for.
        queue: requests that wait for a row.
        seconds: from the arrival of a request to the end of its answer.
        read_seconds: until a request has arrived, and for each piece of an answer to
            be taken.
        connections: open at once.
        schemas: that are compiled or in use at once, each in a process of its own.
        schema_seconds: to compile a schema.
        schema_megabytes: of memory for a schema, in units of 2**20 bytes.
        mask_seconds: for what a schema allows next, over a whole text and beside 20 ms
            for each token.
    """

    body_bytes: int = 1 << 20
    prompt_tokens: int = 32_768
    max_tokens: int = 8_192
    draft_tokens: int = 64
    queue: int = 64
    seconds: float = 600.0
    read_seconds: float = 30.0
    connections: int = 256
    schemas: int = 16
    schema_seconds: float = 5.0
    schema_megabytes: int = 128
    mask_seconds: float = 1.0

    def __post_init__(self) -> None:
        """Refuse limits that let nothing through."""
        for name in self.__slots__:
            least = 0 if name in ("queue", "draft_tokens") else 1e-3
            value = getattr(self, name)
            if not least <= value < float("inf"):
                raise InvalidRequestError(
                    f"The limit {name} is {value!r}, and a finite number of at least "
                    f"{least:g} is needed."
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What holds where a request says nothing, as in mlx-lm's server.

    Attributes:
        max_tokens: of a text.
        temperature: 0 takes the most probable token.
        top_p: 1: off.
        top_k: 0: off.
        min_p: 0: off.
    """

    max_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything but the models.

    Attributes:
        names: of the model; the first is the one that is shown, and requests may use
            all of them.
        draft: the name of what drafts; None: nothing does.
        api_key: what clients have to show; None: nothing.
        allowed_origins: of web pages that may use the server; "*": all.
        max_rows: requests that are decoded together.
        prefill_step: tokens of prompts that are read at once, and between two rounds.
        chat_template_args: keywords for every chat template.
        defaults: see `Defaults`.
        limits: see `Limits`.
    """

    names: tuple[str, ...]
    draft: str | None = None
    api_key: str | None = None
    allowed_origins: tuple[str, ...] = ()
    max_rows: int = 32
    prefill_step: int = 2048
    chat_template_args: dict[str, Any] = field(default_factory=dict)
    defaults: Defaults = Defaults()
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        """Refuse a key that is none, and defaults above the limits."""
        if self.api_key is not None and not self.api_key.strip():
            raise InvalidRequestError(
                "The API key is empty. Leave it out, or give one that nobody guesses."
            )
        if self.defaults.max_tokens > self.limits.max_tokens:
            raise InvalidRequestError(
                f"Texts have {self.defaults.max_tokens} tokens by default and "
                f"{self.limits.max_tokens} at most. Lower the one or raise the other."
            )

"""Settings of a server, independent of HTTP and models.

Each field of `Limits` and `Defaults` also defines an option of the command line.
"""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.option_fields import KvLimits, option


def _limit(default: float, help: str, *names: str, least: float | None = None) -> Any:
    if least is None:
        least = 1e-3 if isinstance(default, float) else min(default, 1)
    return option(default, help, *names, min=least)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of what clients may ask for."""

    panel: ClassVar[str] = "Limits"
    prefix: ClassVar[str] = "--max-"  # of the options' names

    body_bytes: int = _limit(32 << 20, "Maximum size of a request.")
    prompt_tokens: int = _limit(
        0, "Maximum length of a prompt; 0: what the context has room for."
    )
    # 0: the length in the model's config, if the config has one.
    model_len: int = _limit(
        0, "Maximum length of prompt and text; 0: what the model is made for."
    )
    max_tokens: int = _limit(
        0,
        "Maximum length of a text; 0: what the context has room for.",
        "--max-tokens-limit",
    )
    draft_tokens: int = _limit(
        64, "Maximum draft length of a request.", "--max-draft", least=0
    )
    queue: int = _limit(64, "Maximum number of waiting requests.", least=0)
    # From the arrival of a request to the end of its answer.
    seconds: float = _limit(3600.0, "Maximum time for a request.")
    # Also the time in which a client has to read each piece of an answer.
    read_seconds: float = _limit(30.0, "Maximum time to receive a request.")
    connections: int = _limit(256, "Maximum number of open connections.")
    schemas: int = _limit(
        16, "Maximum number of JSON schemas in use, each in a process."
    )
    schema_seconds: float = _limit(5.0, "Maximum time to compile a schema.")
    schema_megabytes: int = _limit(128, "Maximum memory of a schema, in MiB.")
    mask_seconds: float = _limit(
        1.0, "Time for the masks of a text, plus 20 ms per token."
    )

    images: int = _limit(8, "Maximum number of images in a request.", least=0)
    image_bytes: int = _limit(16 << 20, "Maximum size of an image file, in bytes.")
    image_pixels: int = _limit(16_000_000, "Maximum number of pixels of an image.")
    fetch_seconds: float = _limit(10.0, "Maximum time to fetch an image.")

    def __post_init__(self) -> None:
        for each in fields(self):
            least, value = each.metadata["option"]["min"], getattr(self, each.name)
            if not least <= value < float("inf"):
                raise InvalidRequestError(
                    f"The limit {each.name} is {value!r}, and a finite number of at "
                    f"least {least:g} is needed."
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Defaults of request fields."""

    panel: ClassVar[str] = "Defaults of request fields"

    max_tokens: int = option(
        0,
        "Maximum number of tokens; 0: what the context has room for in chats, and 512 "
        "where a text is continued.",
        "--max-tokens",
        "-m",
        min=0,
    )
    temperature: float = option(0.0, "0: greedy.", "--temperature", "--temp", min=0)
    top_p: float = option(1.0, "1: off.", min=0, max=1)
    top_k: int = option(0, "0: off.", min=0)
    min_p: float = option(0.0, "0: off.", min=0, max=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings but the models."""

    names: tuple[str, ...]  # of the model; answers show the first
    draft: str | None = None  # name of the draft; None: no drafting
    api_key: str | None = None  # None: clients need no key
    allowed_origins: tuple[str, ...] = ()  # of web pages; "*": all
    max_rows: int = 32  # the maximum number of requests decoded together
    # Maximum tokens of a prompt chunk between two rounds; None: 2048, or 256 on a CPU
    prefill_step: int | None = None
    chat_template_args: dict[str, Any] = field(default_factory=dict)
    defaults: Defaults = Defaults()
    limits: Limits = Limits()
    image_folder: Path | None = None  # of images that requests may name; None: no files
    fetch_images: bool = False  # whether requests may name images by URL
    fetch_private: bool = False  # whether such URLs may be at private addresses
    reads_images: bool = True  # whether the model reads images; set by `Answering`
    # Limits of the key-value caches; a request that they apply to is decoded alone
    kv: KvLimits = field(default_factory=KvLimits)

    def __post_init__(self) -> None:
        if self.api_key is not None and not self.api_key.strip():
            raise InvalidRequestError(
                "The API key is empty. Leave out --api-key and "
                "MLX_SPECULATION_API_KEY, or give one that nobody guesses."
            )
        if 0 < self.limits.max_tokens < self.defaults.max_tokens:
            raise InvalidRequestError(
                f"max_tokens is {self.defaults.max_tokens} by default, but limited to "
                f"{self.limits.max_tokens}. Lower the one or raise the other."
            )

"""`serve`: runs the server of a model, for clients of three APIs."""

import ipaddress
import json
import logging
import os
import shlex
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import typer

from mlx_speculation.cli.console import Screen
from mlx_speculation.cli.inputs import json_object
from mlx_speculation.cli.load_pair import (
    CacheOptions,
    begin,
    open_pair,
    short_name,
)
from mlx_speculation.cli.options import VISION, PairOptions
from mlx_speculation.cli.run_app import note
from mlx_speculation.option_fields import KvLimits, option
from mlx_speculation.server.config import Defaults, Limits, Settings

if TYPE_CHECKING:
    from mlx_speculation import PrefixCache, SpeculativeGenerator
    from mlx_speculation.server import Server

KEY = "MLX_SPECULATION_API_KEY"
# The largest context that `agent_lines` gets, since some configs set no limit.
MOST_CONTEXT = 1 << 20
AGENT_TOKENS = 32_000  # a session of a coding agent needs this context
LOOK_SECONDS = 0.5
Level = Literal["DEBUG", "INFO", "WARNING", "ERROR"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessOptions:
    """Address, API key and allowed origins."""

    panel: ClassVar[str] = "Address and access"

    host: str = option(
        "127.0.0.1", "Address to listen on; 0.0.0.0 accepts other machines."
    )
    port: int = option(8080, "Port; 0: any free one.", min=0, max=65535)
    api_key: str | None = option(
        None,
        "API key that clients must send; better set in the environment.",
        envvar=KEY,
    )
    allowed_origins: str = option(
        "", "Allowed web origins, separated by commas; *: all."
    )
    model_name: str | None = option(
        None, "Model name in requests. Default: the folder's name."
    )

    @property
    def key(self) -> str | None:
        """The API key; typer alone would ignore an empty environment variable."""
        return os.environ.get(KEY) if self.api_key is None else self.api_key

    def warn(self) -> None:
        """Print a note if other machines can use the server without an API key."""
        if self.key is None and not _is_loopback(self.host):
            note(
                f"the server listens at {self.host}, where other machines may reach it "
                f"without an API key. Set {KEY}, or leave --host out."
            )

    @property
    def origins(self) -> tuple[str, ...]:
        """The web origins that may use the server."""
        given = (origin.strip() for origin in self.allowed_origins.split(","))
        return tuple(origin for origin in given if origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions:
    """Options of the images that requests may name."""

    panel: ClassVar[str] = Limits.panel

    image_folder: Path | None = option(
        None,
        "Folder whose files requests may name as images. Default: none.",
        exists=True,
        file_okay=False,
    )
    fetch_images: bool = option(
        False, "Fetch images that requests name by http:// or https:// URLs."
    )
    fetch_private: bool = option(
        False, "Fetch images from private, loopback and link-local addresses too."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOptions:
    """Options of the engine and the server."""

    panel: ClassVar[str] = "Options"

    max_rows: int = option(
        32,
        "Requests decoded at once.",
        "--max-rows",
        "--decode-concurrency",
        panel=Limits.panel,
        min=1,
    )
    prefill_step_size: int | None = option(
        None,
        "Prompt tokens read between two rounds. Default: 2048, and 256 on a CPU.",
        panel=Limits.panel,
        min=1,
    )
    chat_template_args: str = option(
        "{}",
        "JSON object of keyword arguments for the chat template.",
        panel=Defaults.panel,
    )
    vision: bool = option(False, VISION)
    grace_seconds: float = option(
        5.0, "Time that unfinished requests get at shutdown.", min=0.0
    )
    log_level: Level = option("WARNING", "Level of the log.")


def serve(
    pair: PairOptions,
    access: AccessOptions,
    limits: Limits,
    defaults: Defaults,
    kv: KvLimits,
    cache: CacheOptions,
    images: ImageOptions,
    serving: ServingOptions,
) -> None:
    """Serve a model over HTTP with OpenAI's APIs and Anthropic's."""
    screen = Screen()
    args = json_object("--chat-template-args", serving.chat_template_args)
    begin(pair.blas, screen)
    from mlx_speculation.server import Server

    logging.basicConfig(
        level=serving.log_level, format="%(asctime)s %(levelname)s %(message)s"
    )
    for library in ("httpx2", "httpcore2"):  # URLs of images may hold secrets
        logging.getLogger(library).setLevel(logging.WARNING)
    name = short_name(pair.model)
    settings = Settings(
        # Responses use the first name.
        names=tuple(dict.fromkeys((access.model_name or name, pair.model))),
        draft=None if pair.draft is None else short_name(pair.draft),
        api_key=access.key,
        allowed_origins=access.origins,
        max_rows=serving.max_rows,
        prefill_step=serving.prefill_step_size,
        chat_template_args=args,
        defaults=defaults,
        limits=limits,
        kv=kv,
        image_folder=images.image_folder,
        fetch_images=images.fetch_images,
        fetch_private=images.fetch_private,
    )

    def load(prefixes: "PrefixCache | None") -> "SpeculativeGenerator":
        return open_pair(
            pair,
            screen,
            prefix_cache=prefixes,
            replay=not cache.no_replay,
            vision=serving.vision or None,
        )

    server = Server(
        settings,
        load,
        prefixes=cache.made(),
        host=access.host,
        port=access.port,
    )
    access.warn()
    _until_stopped(server, settings, screen, serving.grace_seconds)


def _until_stopped(
    server: "Server", settings: "Settings", screen: Screen, grace: float
) -> None:
    """Serve until a signal; then end within `grace` seconds."""
    server.start()
    with suppress(KeyboardInterrupt):
        screen.say(f"{settings.names[0]} is served at {server.url}/v1")
        rows = server.worker.main
        context = min(rows.longest, MOST_CONTEXT)
        made_for = rows.generator.context_length or context
        if context > made_for:
            screen.say(
                f"warning: --max-model-len allows {context} tokens, and the model was "
                f"made for {made_for}: longer texts may be nonsense"
            )
        if context < AGENT_TOKENS:
            screen.say(
                f"The context is {context} tokens. Coding agents begin with 7,700 to "
                f"25,000, and need {AGENT_TOKENS:,} or more to work."
            )
        screen.say("To use an agent, run its command in another terminal:")
        for agent, line in agent_lines(server.url, settings.names[0], context).items():
            typer.echo(f"\n# {agent}\n{line}", err=True)  # unwrapped, to be copied
        # Without a timeout, a signal that another thread gets would not end this wait.
        while not threading.Event().wait(LOOK_SECONDS):
            pass
    screen.say("ending")
    if not server.stop(grace):
        logging.shutdown()
        os._exit(1)  # a normal exit would free memory that the engine's thread uses


def agent_lines(url: str, model: str, context: int) -> dict[str, str]:
    """Return the commands that connect coding agents, by the agent's name.

    `url` has no path. `context` limits the tokens of prompt and text together.
    """
    claude = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": model,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(context),
    }
    provider = f'{{name="local", base_url="{url}/v1", wire_api="responses"}}'
    codex = [
        "model_provider=local",
        f"model={model}",
        f"model_context_window={context}",
        f"model_providers.local={provider}",
    ]
    limit = {"context": context, "output": min(context // 2, 32_000)}
    opencode = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {model: {"tool_call": True, "limit": limit}},
    }
    whole = {"provider": {"local": opencode}}
    config = shlex.quote(json.dumps(whole, separators=(",", ":")))
    name = shlex.quote(f"local/{model}")
    variables = " ".join(f"{k}={shlex.quote(v)}" for k, v in claude.items())
    settings = " ".join(f"-c {shlex.quote(each)}" for each in codex)
    return {
        "Claude Code": f"{variables} claude",
        "Codex": f"codex {settings}",
        "OpenCode": f"OPENCODE_CONFIG_CONTENT={config} opencode --model {name}",
    }


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

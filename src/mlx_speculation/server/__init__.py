"""The server `mlx-speculation serve`: HTTP and its APIs, answered by one engine.

    server          starts and stops HTTP and the engine
    http_protocol   one connection, with deadlines; refuses requests by their headers
    routes          one route for each path
    apis/           formats of each API: bodies of requests, events of answers
    request/        requests in one form for all APIs
    chat_prompts    chats as token ids, with messages fitted to the template
    answering       answers a request of any API
    answer_parts    text, reasoning and tool calls of an answer
    job             passes one text between its connection and the engine
    engine_thread   takes jobs; those with equal `draft` and `exact` run together
    batch_runner    runs jobs as rows of a `BatchGenerator`
    schemas/        JSON schemas, compiled in processes with limits

The package `engine` uses nothing of this package.
"""

from typing import TYPE_CHECKING

from mlx_speculation.errors import MissingLibraryError
from mlx_speculation.server.config import Defaults, Limits, Settings
from mlx_speculation.shell_commands import install_command

if TYPE_CHECKING:
    from mlx_speculation.server.server import Server

__all__ = ["Defaults", "Limits", "Server", "Settings"]


def __getattr__(name: str) -> object:
    """Import `Server` at its first use: the command line chooses a BLAS before that.

    Raises:
        MissingLibraryError: a library of the extra "serve" is not installed.
    """
    if name != "Server":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from mlx_speculation.server.server import Server
    except ModuleNotFoundError as error:
        raise MissingLibraryError(
            f"The server needs {error.name}, which is not installed. Install it with: "
            f"{install_command('serve')}"
        ) from error
    return Server

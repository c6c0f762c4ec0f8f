"""The server `mlx-speculation serve`: HTTP, three APIs, and one engine behind them.

    server          starts and stops it
    listener        the socket, and uvicorn in a thread of its own
    http_protocol   one connection: deadlines
    middleware      refusals by the head of a request: framing, access, size
    routes          one for each path
    apis/           the form of each API: bodies in, events out
    request/        what a request asks for, in one form for all APIs
    prompts/        chat templates, and what each of them cannot say
    answering       from a request to its answer: the one way of all APIs
    answer_parts    text, reasoning and tool calls of an answer
    job             a text on its way between its connection and the engine
    engine_thread   takes jobs, and runs rounds
    generators      the loaded models, with each draft and mode that requests ask for
    batch_runner    jobs as requests of a `BatchGenerator`
    schemas/        JSON schemas, compiled in processes with limits

It knows HTTP and threads, and the engine knows neither. Using `Server` imports mlx.
"""

from typing import TYPE_CHECKING

from mlx_speculation.errors import MissingLibraryError
from mlx_speculation.server.config import Defaults, Limits, Settings

if TYPE_CHECKING:
    from mlx_speculation.server.server import Server

__all__ = ["Defaults", "Limits", "Server", "Settings"]


def __getattr__(name: str) -> object:
    """Load the server when it is used: the command line chooses the BLAS before.

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
            "pip install 'mlx-speculation[serve]'"
        ) from error
    return Server

"""The server `mlx-speculation serve`: mlx-lm's own, with this package's engine in it.

    server          starts and stops it: sockets in front, one engine thread behind
    handler         one connection: request in, answer out
    access          paths, allowed origins, the API key
    request/        from the bytes of a request to a checked request
    job             a request on its way between its connection and the engine
    engine_thread   takes jobs, and runs rounds
    batch_runner    jobs as requests of a `BatchGenerator`
    answer_parts    content, reasoning and tool calls of a text
    mlx_lm_server   the parts of mlx-lm's server that are used here
    schemas/        JSON schemas, compiled in processes with limits

It knows HTTP and threads, and the engine knows neither. Using `Server` imports mlx.
"""

from typing import TYPE_CHECKING

from mlx_speculation.server.config import Defaults, Limits, Settings

if TYPE_CHECKING:
    from mlx_speculation.server.server import Server

__all__ = ["Defaults", "Limits", "Server", "Settings"]


def __getattr__(name: str) -> object:
    """Load the server when it is used: the command line chooses the BLAS before."""
    if name != "Server":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mlx_speculation.server.server import Server

    return Server

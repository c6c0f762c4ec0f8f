"""The server `mlx-speculation serve`: mlx-lm's own, with this package's engine in it.

    server          starts and stops it: sockets in front, one engine thread behind
    handler         one connection: request in, answer out
    request/        from the bytes of a request to a checked request
    job             a request on its way between its connection and the engine
    engine_thread   takes jobs, and runs rounds
    batch_runner    jobs as requests of a `BatchGenerator`
    mlx_lm_server   the parts of mlx-lm's server that are used here
    schemas/        JSON schemas, compiled in processes with limits

It knows HTTP and threads, and the engine knows neither. Importing it imports mlx.
"""

from mlx_speculation.server.config import Defaults, Limits, Settings
from mlx_speculation.server.server import Server

__all__ = ["Defaults", "Limits", "Server", "Settings"]

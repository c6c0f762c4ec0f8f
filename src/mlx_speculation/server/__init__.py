"""The server `mlx-speculation serve`: mlx-lm's own, with this package's engine in it.

It stands at the front door, beside the command line: it knows HTTP and threads, and the
engine knows neither. Importing it imports mlx.
"""

from mlx_speculation.server.serving import Server
from mlx_speculation.server.settings import Defaults, Limits, Settings

__all__ = ["Defaults", "Limits", "Server", "Settings"]

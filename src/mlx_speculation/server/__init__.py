"""The server `mlx-speculation serve`: mlx-lm's own, with this package's engine in it.

It stands at the front door, beside the command line: it knows HTTP and threads, and the
engine knows neither. Importing it imports mlx.
"""

from mlx_speculation.server.config import Defaults, Limits, Settings
from mlx_speculation.server.server import Server

__all__ = ["Defaults", "Limits", "Server", "Settings"]

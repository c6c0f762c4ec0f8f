"""Where this package keeps what may be lost at any time.

That is the folder which MLX_SPECULATION_CACHE names, else mlx-speculation under
XDG_CACHE_HOME or ~/.cache.
"""

import os
from pathlib import Path


def cache_folder() -> Path | None:
    """Return the folder for what may be lost, by the XDG base directory rules.

    None: nobody knows where the user's home is.
    """
    named = os.environ.get("MLX_SPECULATION_CACHE")
    if named:
        return Path(named)
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not home.is_absolute():  # such a path is to be ignored, as the rules say
        try:
            home = Path.home() / ".cache"
        except RuntimeError:
            return None
    return home / "mlx-speculation"

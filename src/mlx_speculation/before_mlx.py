"""Import hook that chooses the BLAS before mlx is loaded, or warns if it is too late.

Every import of the package loads this module. It imports only `sys`, so that the
command line starts fast.
"""

import sys

TYPE_CHECKING = False  # `typing` would take longer to import than this module
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_MLX = "mlx.core"
_USES_MLX = tuple(
    f"mlx_speculation.{folder}" for folder in ("caches", "engine", "models", "samplers")
)


class _FirstUse:
    """A module finder that finds nothing, but sees the imports."""

    done = False

    def find_spec(
        self,
        fullname: str,
        path: "Sequence[str] | None" = None,
        target: "ModuleType | None" = None,
    ) -> "ModuleSpec | None":
        """Choose the BLAS when mlx is imported; warn once if mlx is already loaded.

        The finder stays in `sys.meta_path`: Python iterates over that list here, and
        would skip the next finder if this one were removed.
        """
        early = fullname == _MLX
        late = fullname in _USES_MLX and _MLX in sys.modules
        if self.done or not (early or late):
            return None
        from mlx_speculation.blas import automatic

        if early:
            automatic.choose_blas()  # if it raises, the next import of mlx tries again
            self.done = True
        else:
            self.done = True  # before the warning, which can be raised as an error
            automatic.say_that_mlx_came_first()
        return None


def watch() -> None:
    """Install the import hook on Linux; other systems have no choice of BLAS."""
    if sys.platform == "linux":
        sys.meta_path.insert(0, _FirstUse())

"""Looks after the BLAS when a program first imports mlx, or uses this package late.

It imports nothing itself: whoever imports this package comes by here, also the command
line, which has to be quick. `mlx_speculation.blas` decides what to do.
"""

import sys

TYPE_CHECKING = False  # as typing's, which takes longer to load than this
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_MLX = "mlx.core"
_USES_MLX = tuple(
    f"mlx_speculation.{folder}" for folder in ("caches", "engine", "models", "samplers")
)


class _FirstUse:
    """A finder of modules that finds none, and sees which are about to be loaded."""

    done = False

    def find_spec(
        self,
        fullname: str,
        path: "Sequence[str] | None" = None,
        target: "ModuleType | None" = None,
    ) -> "ModuleSpec | None":
        """Choose the BLAS if this is mlx; say so once if mlx was there before us.

        It stays where it is afterwards: who takes a finder out of the list that is
        being gone through lets its neighbour be skipped.
        """
        early = fullname == _MLX
        late = fullname in _USES_MLX and _MLX in sys.modules
        if self.done or not (early or late):
            return None
        from mlx_speculation.blas import automatic

        if early:
            automatic.choose_blas()  # refused, it is asked again
            self.done = True
        else:
            self.done = True  # said once, also where a warning is an error
            automatic.say_that_mlx_came_first()
        return None


def watch() -> None:
    """Look after the BLAS from now on; on Linux only, elsewhere there is no choice."""
    if sys.platform == "linux":
        sys.meta_path.insert(0, _FirstUse())

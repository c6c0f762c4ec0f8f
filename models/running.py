"""What a device needs while a model generates."""

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.nn as nn
from mlx_lm.generate import wired_limit


@contextmanager
def wired(model: nn.Module) -> Iterator[None]:
    """Keep the model's weights wired on devices that page memory, as mlx-lm does.

    Elsewhere, such as on a CPU, it does nothing.
    """
    with wired_limit(model):
        yield

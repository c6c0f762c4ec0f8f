"""The options of a generator and of a stream, each as one checked value.

A new option is a field of `GeneratorOptions` or `StreamOptions`, the same name in the
keywords below it, by which type checkers know the public calls, and its place in the
documentation. This room does not know generators and streams.
"""

from mlx_speculation.engine.options.generator import (
    GeneratorKeywords,
    GeneratorOptions,
)
from mlx_speculation.engine.options.stream import StreamKeywords, StreamOptions

__all__ = [
    "GeneratorKeywords",
    "GeneratorOptions",
    "StreamKeywords",
    "StreamOptions",
]

"""The options of a generator and of a stream, each as one checked dataclass.

To add an option, add a field to `GeneratorOptions` or `StreamOptions`, the same name to
the keywords below that class (for type checkers), and a line to the documentation. This
package does not import generators and streams.
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

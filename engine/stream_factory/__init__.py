"""Factory of a generator's streams, from checked options.

`requests` makes the `Request` that rounds run with, `streams` the `Stream` that a
caller reads, and `image_input` checks a prompt with images.
"""

from mlx_speculation.engine.stream_factory.streams import StreamFactory

__all__ = ["StreamFactory"]

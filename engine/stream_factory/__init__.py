"""Making a stream of a generator from its checked options.

`requests` makes what rounds are run with, `streams` what a caller reads, and
`image_input` checks a prompt with images.
"""

from mlx_speculation.engine.stream_factory.streams import StreamFactory

__all__ = ["StreamFactory"]

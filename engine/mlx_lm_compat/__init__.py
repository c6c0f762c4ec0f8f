"""mlx-lm's own generation functions, with speculation: keywords, caches, responses.

`vision_generate` does the same for mlx-vlm's.

It translates mlx-lm's arguments to this package's and results back. Nothing below it
knows these names.
"""

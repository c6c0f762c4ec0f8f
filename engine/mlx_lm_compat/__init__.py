"""mlx-lm's generation functions with speculation, and mlx-vlm's in `vision_generate`.

The functions translate mlx-lm's arguments for `SpeculativeGenerator`, and its chunks
into mlx-lm's responses.
"""

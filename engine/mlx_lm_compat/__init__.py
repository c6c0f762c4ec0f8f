"""mlx-lm's generation functions with speculation, and mlx-vlm's in `vision_generate`.

They translate the arguments of mlx-lm into those of `SpeculativeGenerator`, and its
results into mlx-lm's responses.
"""

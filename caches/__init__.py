"""The transaction over mlx-lm caches: one journal per kind of cache."""

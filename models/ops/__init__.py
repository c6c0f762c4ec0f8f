"""Which operation runs in a round: dispatch between mlx's own, `cpu` and `cuda`.

It replaces functions that mlx-lm's layers call, while a round runs and in its thread
alone. It knows shapes and devices; it does not know drafters, caches or tokens.
"""

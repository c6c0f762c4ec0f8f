"""Changes of logits before a token is chosen: processors, penalties, filters.

Each takes many rows at once, with the tokens before each row, and returns for every row
the result of mlx-lm on that row alone.
"""

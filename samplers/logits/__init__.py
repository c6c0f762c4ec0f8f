"""Changes of logits before a token is chosen: processors, penalties, filters.

Each of them takes many rows at once, with the tokens that precede each row, and gives
every row what mlx-lm would give it alone. Nothing here chooses a token or knows a rule.
"""

"""A lane: a model, its caches, and the tokens that they hold.

Lanes do not know how tokens are drafted or accepted.
"""

"""A lane: a model, its caches, and the tokens that they hold.

`base` has the protocols, `single` a lane of one request, `batch` a lane of many. A
round feeds tokens to the model of a lane; then a commit keeps a prefix of them, or a
rollback keeps none. Lanes do not know how tokens are drafted or accepted.
"""

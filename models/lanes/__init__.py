"""A lane: a model, its caches, and the tokens that they hold.

`base` has the protocols, `single` a lane of one request, `batch` a lane of many. Lanes
do not know how tokens are drafted or accepted.
"""

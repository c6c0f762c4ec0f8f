"""A lane: a model, its caches, and the tokens that they hold.

`base` has the protocols, `single` a lane of one request, `batch` a lane of many. A
round feeds tokens to the model of a lane, and is then committed or rolled back as a
whole. Lanes do not know how tokens are drafted or accepted.
"""

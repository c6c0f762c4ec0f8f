"""A lane: a model, its caches, and the tokens that they hold.

`lane` for one sequence, `batch_lane` for many; a round on a lane is fed, then committed
or rolled back as a whole. How tokens are drafted or accepted is not known here.
"""

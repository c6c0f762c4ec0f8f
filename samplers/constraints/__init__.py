"""Constraints: which token ids may come next.

`base` has the protocols that a user implements, `progress` one generation under a
constraint, `masks` the allowed ids of many rows, and `llguidance` JSON schemas, regular
expressions and grammars. No constraint knows models, caches or probabilities.
"""

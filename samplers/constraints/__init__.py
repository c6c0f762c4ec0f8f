"""Constraints: which token ids may come next.

`base` has the protocols that a user implements, `progress` follows one generation,
`masks` has the allowed ids of many rows, and `llguidance` has JSON schemas, regular
expressions and grammars.
"""

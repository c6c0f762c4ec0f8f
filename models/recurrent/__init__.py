"""Recording recurrent mixers in the forward over a draft, and replaying a prefix.

`mixers` is the table of mixers, `recorder` records the inputs of their calls, `replay`
computes the state after the accepted tokens. This package does not know how tokens are
accepted.
"""

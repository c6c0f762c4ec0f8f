"""Recording recurrent mixers during a verify forward, and replaying a prefix.

`mixers` is the table of mixers, `recorder` records the inputs of their calls, `replay`
computes the state after the accepted tokens. They do not know how tokens are accepted.
"""

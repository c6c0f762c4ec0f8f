"""Recording recurrent mixers during a verify forward, and replaying a prefix.

`mixers` is the table of the mixers that can be replayed, `recorder` notes what they are
fed, `replay` computes the state after the accepted tokens. Who accepts is not known.
"""

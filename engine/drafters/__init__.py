"""Drafters: what proposes tokens, one file for each.

`base` has the protocols `Drafter` and what a draft is. `registry` tells the kind of a
draft folder, `resolve` makes a drafter of a `draft=` argument. A drafter does not know
how its tokens are accepted, or how long its next draft will be.
"""

"""Drafters: what proposes tokens, one file for each.

`base` has the base class, `OpenDrafter`, and what is proposed, `draft` what opens one,
`Draft`. `registry` tells the kind of a draft folder, `resolve` makes a draft of a
`draft=` argument, `user_drafter` adapts objects of a user's. A drafter does not know
how its tokens are accepted, or how long its next draft will be.
"""

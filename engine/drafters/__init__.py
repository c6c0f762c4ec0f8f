"""Drafters, which propose tokens: one file for each kind.

`base` defines `OpenDrafter` and `Proposal`, `draft` defines `Draft`, which opens a
drafter for each stream. `registry` finds the kind of a draft folder, `resolve` makes a
`Draft` from a `draft=` argument, `user_drafter` adapts users' objects. A drafter knows
neither the acceptance rule nor the length of its next draft.
"""

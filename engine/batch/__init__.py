"""Many requests at once: rows that join and leave between rounds.

`generator` is what a user sees, `decoder` runs the rounds, `base` has the protocol of
what drafts for all rows: `draft_model` and `mtp` at once, `per_request` one after the
other. Distribution over ranks is not known here.
"""

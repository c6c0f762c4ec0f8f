"""Many requests at once: rows that join and leave between rounds.

`generator` is what a user sees, `decoder` runs the rounds, `drafting` has the protocol
of what drafts for all rows. Distribution over ranks is not known here.
"""

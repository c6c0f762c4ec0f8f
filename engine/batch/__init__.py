"""Many requests at once: rows that join and leave between rounds.

`generator` is what a user sees, `request` one request among others. In the `queue` they
wait and end; `running` lets them join and leave and has rounds of `engine.round` run
for all of them, whose drafts `drafting` plans. Distribution over ranks is not known
here.
"""

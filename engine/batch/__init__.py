"""Continuous batching: requests join and leave a batch between rounds.

`queue` keeps the requests from insertion to end. `running` runs rounds of
`engine.round` for the requests that share forwards, and `planning` plans their drafts.
A target on several ranks is refused.
"""

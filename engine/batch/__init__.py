"""Continuous batching: requests join and leave a batch between rounds.

`generator` has the public class, `request` one request of a batch. `queue` keeps the
requests from insertion to end. `running` lets requests join and leave, and runs rounds
of `engine.round` for all of them; `planning` plans the drafts. Batches run on one rank.
"""

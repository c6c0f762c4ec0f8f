"""Continuous batching: requests join and leave a batch between rounds.

`generator` has the public class, `request` one request of a batch. `queue` keeps the
requests from insertion to end. `running` lets requests join and leave, and runs rounds
of `engine.round` for all of them; `planning` plans the drafts. `calibration` measures
the costs of rounds of batches and of streams in advance. Batches run on one rank.
"""

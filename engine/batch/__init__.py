"""Continuous batching: requests join and leave a batch between rounds.

`generator` has the public class, `request` one request of a batch. Requests wait and
end in the `queue`. `running` lets them join and leave, and runs a round of
`engine.round` for all of them; `drafting` plans the drafts. `calibration` measures the
costs of rounds beforehand, also those of streams. Batches run on one rank.
"""

"""A target that is sharded over several ranks: rank 0 leads, the others follow.

Every rank runs the same program, and so the same forwards in the same order. Rank 0
decides what could differ between ranks: draft lengths, drafts, chosen tokens, the end
of a stream. It sends its decisions as small arrays of `mx.distributed`; there is no
other connection.

    group             the ranks, and the exchange that checks that they are in step
    ring_watch        detection of lost neighbours in mlx's ring
    session           one stream on all ranks, and the protocol `LeaderFollower`
    leader_follower   leader and follower, around draft lengths, drafter and verifier
    consistency       values that have to be equal on all ranks
    target            the part of a generator that deals with ranks

A stream runs on all ranks if it is given a session.
"""

from mlx_speculation.engine.distributed.consistency import digest_of, shown
from mlx_speculation.engine.distributed.leader_follower import never_called, on_ranks
from mlx_speculation.engine.distributed.session import (
    ClosedByLeaderError,
    RankSession,
)
from mlx_speculation.engine.distributed.target import RankedTarget, all_or_none

__all__ = [
    "ClosedByLeaderError",
    "RankSession",
    "RankedTarget",
    "all_or_none",
    "digest_of",
    "never_called",
    "on_ranks",
    "shown",
]

"""A target on several ranks: rank 0 leads, the others follow.

Every rank runs the same program, and with it the same forwards in the same order. What
may differ between ranks (draft lengths, drafts, chosen tokens, the end of a stream) is
decided on rank 0 and sent as small arrays of `mx.distributed`; there is no connection
beside it.

    group             the ranks, and the exchange in which they agree where they are
    ring_watch        whether a neighbour in mlx's ring is gone
    session           one stream on all ranks, and the protocol `LeaderFollower`
    leader_follower   the two sides of it, around draft lengths, drafter and verifier
    consistency       what has to be equal on all ranks
    target            the part of a generator that knows of ranks

A stream that is given a session runs so. This room knows neither text nor how a round
runs.
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

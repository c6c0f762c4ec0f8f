"""A target that is sharded over several ranks: rank 0 leads, the others follow.

Every rank runs the same program: the same forwards in the same order. Rank 0 decides
what could differ between ranks: draft lengths, drafts, chosen tokens, the end of a
stream. It sends its decisions as small arrays of `mx.distributed`.

    group             the ranks, and the check that all are at the same exchange
    ring_watch        detection of lost neighbours in mlx's ring
    session           one stream on all ranks
    leader_follower   draft lengths, drafter and verifier of leader and followers
    target            the part of a generator that deals with ranks
"""

from mlx_speculation.engine.distributed.leader_follower import never_called, on_ranks
from mlx_speculation.engine.distributed.session import (
    ClosedByLeaderError,
    RankSession,
)
from mlx_speculation.engine.distributed.target import RankedTarget

__all__ = [
    "ClosedByLeaderError",
    "RankSession",
    "RankedTarget",
    "never_called",
    "on_ranks",
]

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
    setup             what the rest of the engine calls

`engine.ranked_stream` is the stream that runs so. It knows neither text nor how a round
runs.
"""

from mlx_speculation.engine.distributed.consistency import fields_of_stream
from mlx_speculation.engine.distributed.leader_follower import RankParts
from mlx_speculation.engine.distributed.setup import StreamSetup
from mlx_speculation.engine.distributed.target import RankedTarget, all_or_none

__all__ = [
    "RankParts",
    "RankedTarget",
    "StreamSetup",
    "all_or_none",
    "fields_of_stream",
]

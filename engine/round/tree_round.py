"""The target's forward over a draft that is a tree, and its accepted path.

    fed       t   a  ac  b  be          rows 0 to 4; ac: the token c after a
    choices   b   .  .   e  x           b, then e, then x: accepted 2
    path      0   3  4                  these rows become the first three
    emitted   b  e  x                   the lane keeps t b e, as after a chain

The path is read together with the tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlx_speculation.caches import holds_trees
from mlx_speculation.engine.drafters.base import Proposal
from mlx_speculation.engine.round.outcome import Pending
from mlx_speculation.engine.round.request import Request, Running
from mlx_speculation.engine.round.verify import unseen
from mlx_speculation.engine.timing import RoundClock
from mlx_speculation.models import keep_path, tree_forward, tree_rows
from mlx_speculation.samplers import Decided, Group, Rows, serves_trees, verify_tree


@dataclass(frozen=True, slots=True)
class PendingTree(Pending):
    """A submitted forward over a tree; the result is not read yet."""

    # int32 [levels]: the accepted nodes, then arbitrary values
    path: mx.array = field(kw_only=True)
    shown: bool = field(kw_only=True)  # whether the round has hidden states

    def wait(self, clock: RoundClock) -> None:
        """Wait, then move the rows of the path to the front of the draft's rows."""
        Pending.wait(self, clock)
        nodes: Any = self.path.tolist()  # came with the tokens
        (group,) = self.decided.groups
        accepted: Any = group.verified.accepted
        path = [self.fed + node for node in nodes[: accepted.item()]]
        lane_round: Any = self.lane_round
        keep_path(lane_round, [*range(self.fed), *path], shown=self.shown)


def nodes_for(request: Request, nodes: int) -> int:
    """Return how many nodes the trees of a request may have; 0: drafts are chains.

    Drafts are chains in each of these cases: a constraint; logits processors or a
    sampler function of the user; XTC; the acceptance rules "rejection" and "block";
    caches that will be quantized or cannot hold trees. A generator with trees has
    neither several ranks nor an exact mode.
    """
    target = request.target
    keeps = target.quantization is None and holds_trees(target.caches)
    free = request.masks is None and serves_trees(request.verifier)
    return nodes if keeps and free else 0


def submit_tree(
    running: Running,
    lane_round: Any,
    drafts: Sequence[Proposal],
    step: Pending | None = None,
) -> Pending:
    """Submit a forward over the known tokens unseen by the target, and over a tree."""
    assert step is None  # with a step in flight, drafts are chains
    (request,), (draft,) = running.requests, drafts
    clock, exact, branches = running.clock, running.explain, draft.branches
    assert branches is not None
    fed, levels, parents = unseen(running)[0], branches.levels, branches.parents
    lead = len(fed)
    rows = tree_rows(parents, levels, lead)
    with tree_forward(rows):
        both = mx.concatenate([fed, draft.tokens])
        logits = lane_round.forward(both)[lead - 1 :]
    if not exact:
        clock.submit("verify", logits)  # runs while the graph of choices is built
    clock.wait("draft", draft.tokens)
    if exact:
        clock.submit("verify", logits)
    known = request.sequence
    chain = mx.zeros(levels, mx.uint32)  # only the number of tokens matters
    result = verify_tree(
        request.verifier,
        logits,
        Rows(known.tokens, chain, levels + 1, known.start),
        draft.tokens,
        parents,
        rows.seen[lead - 1 :, lead - 1 :],
        levels,
        top=request.top,
    )
    if exact:
        clock.wait("verify", logits)
    arrays = [*result.verified.arrays, result.path]
    clock.submit("sampler" if exact else "verify", *arrays)
    decided = Decided((Group((0,), result.verified),), {})
    lane = request.target
    shown = lane.taps is not None or lane.follower is not None
    return PendingTree(
        lane_round, lead, logits, decided, fed, path=result.path, shown=shown
    )

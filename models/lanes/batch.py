"""A model and the caches of several requests, which one forward feeds together.

The caches are mlx-lm's own batch caches. Shorter rows have padding on their left. A
request's row of a rotating cache or of a recurrent state is the same as if the request
ran alone.

If each new number of rows costs much (`models/shape_buckets.py`), the number of rows in
a round of several positions is rounded up to one of a few sizes. Spare places then hold
copies of the first row, or rows of requests that have left. Spare places are fed the
tokens of the first row, and keep as many positions as that row. Logits of spare places
are not read.

    rows a b c d e f g h, 3 positions      fed   a b c d e f g h     [8, 3]
    c leaves                               fed   a b a d e f g h     [8, 3]
    f and h leave                          fed   a b d e g a         [6, 3]
    i joins                                fed   a b d e g i         [6, 3]

The row of a request that has left stays until a request joins, the number of fed rows
changes, or this row needs a larger buffer than all live rows. Removing the row at once
would copy all caches, which takes as long as a round.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.caches import (
    Keep,
    SlidingKVCache,
    Speculation,
    columns_shown,
    extend_all,
    leaves,
    meets_plans,
    merged,
    others_are_longer,
    states,
    with_slack,
)
from mlx_speculation.models.exclusions import takes_key_steps
from mlx_speculation.models.lanes.base import RequestLane, RequestRound
from mlx_speculation.models.round_context import plain_step, rows_of_a_round
from mlx_speculation.models.shape_buckets import RowSizes, row_size

NOTHING = nullcontext()


class BatchLane(RequestLane):
    """One model with the caches of many requests.

    `model` has to be allowed in batches by `models.exclusions`. `sizes` has the row
    counts to which rounds of several positions are padded.

    Attributes:
        places: the number of rows of the caches, spare ones included.
        stand: the place of each request.
        members: the `Lane` of each request; rounds update its `seen` and `follower`.
    """

    def __init__(self, model: nn.Module, sizes: RowSizes | None = None) -> None:
        self.model = model
        self.caches: list[Any] = []
        self.requests = self.places = 0
        self.stand: list[int] = []
        self.members: list[Any] = []
        self.key_steps = takes_key_steps(model)
        self._met: set[tuple[int, ...]] = set()  # places, positions, columns
        self._fresh = False
        self._sizes = sizes or RowSizes()
        self._in_sizes = False
        self._slack = False  # whether the lanes have `SlidingKVCache`s
        self._wide = False  # whether the last round had several positions

    @property
    def size(self) -> int | None:
        """Number of rows of a padded forward of several positions; None: no padding."""
        return self._sizes.of(self.requests) if self._in_sizes else None

    def join(self, lanes: Sequence[RequestLane]) -> "BatchLane":
        """Add the requests of lanes that were fed alone; return this batch."""
        kinds = [type(leaf) for lane in lanes for _, leaf in leaves(lane.caches)]
        joining = merged([lane.caches for lane in lanes], in_steps=self.key_steps)
        if self.requests:
            self._arrange(self.stand, self.requests)
            extend_all(self.caches, joining)
        else:
            self.caches = joining
        self._slack = SlidingKVCache in kinds
        self.requests += len(lanes)
        self.part = lanes[0].part
        self.members = [*self.members, *lanes]
        self.places = self.requests
        self.stand = list(range(self.requests))
        used = self._sizes.used
        pays = self.key_steps and meets_plans(self.caches)
        self._in_sizes = pays if used is None else used
        for lane in lanes:
            lane.caches, lane.holder = [], self
        return self

    def leave(self, stay: Sequence[int]) -> None:
        """Keep these requests, in this order, and drop all others."""
        self.requests = len(stay)
        self.stand = [self.stand[index] for index in stay]
        for index, lane in enumerate(self.members):
            if index not in stay:
                lane.holder = None
        self.members = [self.members[index] for index in stay]
        size = self.size if self._wide else None
        if not stay:
            self.caches, self.places = [], 0
        elif size != self.places or others_are_longer(self.caches, self.stand):
            self._arrange(self.stand, size or self.requests)

    def extract(self, place: int) -> list[Any]:
        """Return copies of a request's caches, of the kinds that it had in its lane."""
        caches = [cache.extract(self.stand[place]) for cache in self.caches]
        return with_slack(caches) if self._slack else caches

    def places_of(self, lanes: Sequence[RequestLane]) -> list[int]:
        """Return the indices of the requests of `lanes` on the caches' batch axis."""
        return [self.stand[self.members.index(lane)] for lane in lanes]

    def begin(self, count: int, *, whole: bool = False) -> "BatchRound":
        """Open a round, see `RequestLane`.

        Rounds of one position need no padding to `size`: cuDNN makes no plan for them.
        """
        self._wide = count > 1
        size = self.size if self._wide else None
        if size is not None and size != self.places:
            self._arrange(self.stand, size)
        return BatchRound(self, count, whole=whole)

    def note_shape(self, count: int) -> None:
        """Remember that `count` positions of each row were fed."""
        if count > 1 and self._in_sizes:
            shape = (self.places, count, *columns_shown(self.caches))
            self._fresh = self._fresh or shape not in self._met
            self._met.add(shape)

    def padding(self, count: int) -> int:
        """Return how many padding positions a forward over `count` positions gets."""
        drafted = count - 1
        return row_size(drafted) - drafted if self._in_sizes and drafted else 0

    def met_new_shapes(self) -> bool:
        """Return whether a forward since the last call may have made a cuDNN plan."""
        fresh, self._fresh = self._fresh, False
        return fresh

    @property
    def fed_as(self) -> list[int]:
        """The request whose tokens each place is fed; request 0 for spare places."""
        result = [0] * self.places
        for row, place in enumerate(self.stand):
            result[place] = row
        return result

    def live(self, logits: mx.array) -> mx.array:
        """Return the rows of requests from an array of all places, [places, ...]."""
        if self.stand == list(range(self.requests)):
            return logits if self.requests == self.places else logits[: self.requests]
        return logits[mx.array(self.stand)]

    def _arrange(self, live: Sequence[int], places: int) -> None:
        """Move the rows at places `live` to the front; fill up with copies of one."""
        order = [*live, *[live[0]] * (places - len(live))]
        if order != list(range(self.places)):
            indices = mx.array(order)
            mx.eval(indices)
            for cache in self.caches:
                cache.filter(indices)
            # Evaluated apart from the next forward: both together would need new CUDA
            # graphs, which take five times as long as known graphs.
            mx.async_eval(states(self.caches))
        self.places = places
        self.stand = list(range(len(live)))


class BatchRound(RequestRound):
    """A round of many requests, see `RequestRound`."""

    def __init__(self, lane: BatchLane, count: int, *, whole: bool = False) -> None:
        self._lane, self._count, self._whole = lane, count, whole
        # The request whose tokens each place gets; None: place i gets request i's.
        in_order = lane.stand == list(range(lane.places))
        self._fed_as = None if in_order else lane.fed_as
        self.speculation = Speculation(lane.caches, whole=whole)
        self._members = lane.members
        self._kept: list[int] = []  # tokens kept of each request by the commit
        # The members' `follower`s keep states for one head, so their taps are the same.
        followers = [each.follower for each in lane.members if each.follower]
        self._taps = followers[0].taps if followers else None
        self._hidden = None if self._taps is None else self._taps.states()

    def forward(self, tokens: mx.array) -> mx.array:
        """Feed tokens [requests, n]; return logits [requests, n, vocab]."""
        lane, width, stand = self._lane, tokens.shape[1], None
        if self._fed_as is not None:
            tokens, stand = tokens[mx.array(self._fed_as)], lane.stand
        more = lane.padding(width) if width == self._count and not self._whole else 0
        if more:
            tokens = mx.pad(tokens, [(0, 0), (0, more)])  # no request keeps this
        step = plain_step(tokens.size) if self._whole else NOTHING
        taps = NOTHING if self._taps is None else self._taps.collect(self._hidden)
        with taps, rows_of_a_round(lane.part), step:
            logits: mx.array = lane.model(tokens, cache=self.speculation.caches)
        lane.note_shape(width + more)
        if self._hidden is not None and (more or stand is not None):
            self._hidden.cut(width, stand)
        logits = logits[:, :width] if more else logits
        return logits if stand is None else lane.live(logits)

    def prepare(self, keep: Keep) -> None:
        """Prepare the commit of the caches; see `Speculation.prepare`."""
        self.speculation.prepare(self._each(keep))

    def commit(self, keep: Keep) -> None:
        """Keep the first `keep` tokens: a number for each request, or one for all."""
        hidden = self._hidden
        selects = {each.follower.select for each in self._members if each.follower}
        # Selecting can fail, so it comes before the commit of the caches.
        selected = {} if hidden is None else {s: s(hidden) for s in selects}
        self.speculation.commit(self._each(keep))
        each = [keep] * len(self._members) if isinstance(keep, int) else keep
        for place, (member, count) in enumerate(zip(self._members, each, strict=True)):
            if member.follower is not None and selected:
                states = selected[member.follower.select]
                member.follower.add(member.seen, states[place : place + 1], count)
            member.seen += count
        self._kept = [*each]

    def rollback(self) -> None:
        """Undo every forward, even after a commit if nothing has been written since."""
        self.speculation.rollback()
        for member, count in zip(self._members, self._kept, strict=False):
            member.seen -= count
            if member.follower is not None and count:
                member.follower.take_back(member.seen)
        self._kept = []

    def _each(self, keep: Keep) -> Keep:
        """Return `keep` for each place; spare places keep as many as the first row."""
        if isinstance(keep, int) or self._fed_as is None:
            return keep
        return [keep[row] for row in self._fed_as]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.speculation.__exit__(*error)

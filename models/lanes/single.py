"""The lane of one request: a model, its caches, and how many tokens they hold.

A lane is fed `tokens[seen:]`, so the lanes of a target and of its draft model need not
hold equally many tokens.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, Self

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation.caches import (
    FixedShape,
    Keep,
    KVQuantization,
    Snapshot,
    Speculation,
    asks_cudnn,
    check_fixed,
    check_single,
    check_supported,
    position,
    restore,
    states,
    with_slack,
)
from mlx_speculation.errors import InvalidRequestError, UnsupportedModelError
from mlx_speculation.interrupts import checkpoint
from mlx_speculation.models.device_ops import CompiledForward
from mlx_speculation.models.exclusions import takes_key_steps
from mlx_speculation.models.introspect.hidden_states import HiddenStates
from mlx_speculation.models.introspect.position_table import (
    check_positions,
    position_table,
)
from mlx_speculation.models.introspect.taps import States
from mlx_speculation.models.lanes.base import RequestLane, RequestRound
from mlx_speculation.models.lanes.batch import NOTHING, BatchLane
from mlx_speculation.models.lanes.committed_states import CommittedStates
from mlx_speculation.models.lanes.prefill_step import PREFILL_STEP
from mlx_speculation.models.lanes.restore_points import RestorePoints
from mlx_speculation.models.recurrent.replay import noting_reruns
from mlx_speculation.models.round_context import (
    fixed_shape_forward,
    plain_step,
    rows_of_a_round,
)
from mlx_speculation.models.shape_buckets import RowSizes

COUNTED_EVERY = 64  # rounds; a count of bytes takes about ten microseconds a layer

Replaced = list[tuple[int, Any]]  # indices and old caches
Sliding = Literal["slack", "native"]


class Lane(RequestLane):
    """One model with its caches, for one request.

    Args:
        caches: mlx-lm caches of the model; None: new ones.
        seen: how many tokens of the sequence the caches hold.
        sliding: "slack" replaces new `RotatingKVCache`s by `SlidingKVCache`s. Passed
            caches are not replaced.
        shape: the shape of every forward in exact mode. Requires `check_fixed_shape`
            and `ModelHooks` for the model. None: not exact.

    Attributes:
        shows: whether to evaluate the hidden states of every chunk of a prompt. If one
            rank reads the states, all ranks that share the target have to set this.
        prefill_progress: called with the length of every chunk of a prompt, after the
            chunk is kept.
        positions: the number of positions that the model has embeddings for. A forward
            past them is refused.
        is_draft: whether this is a drafter's lane. Its prompts use a round's
            operations, which are faster than mlx's and differ by rounding.
        run: the callable for a forward: the model, or a request's `ImageForward`.
        sizes: the row counts to which a batch made from this lane pads its rounds;
            None: the default `RowSizes()`.

    Raises:
        UnsupportedCacheError: a cache is of an unknown kind, or holds a batch.
        InvalidRequestError: the number of caches is not the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        caches: list[Any] | None = None,
        seen: int = 0,
        *,
        sliding: Sliding = "native",
        shape: FixedShape | None = None,
    ) -> None:
        native = make_prompt_cache(model)
        if caches is None:
            caches = with_slack(native) if sliding == "slack" else native
        self.model = model
        self.run: Callable[..., mx.array] = model
        self.caches = caches
        self.requests = 1
        self.sizes: RowSizes | None = None
        self.shape = shape
        self.seen = seen
        self.reruns = 0
        self.mixer_reruns = 0
        self.points: RestorePoints | None = None
        self.taps: HiddenStates | None = None
        self.follower: CommittedStates | None = None
        self.shows = False
        self.round_bytes = 0  # the largest measured size of an open round
        self._widest = self._rounds = 0
        # Computed once: it depends on the model and the device only.
        self.key_steps = takes_key_steps(model) and asks_cudnn(mx.float16)
        self.prefill_step = PREFILL_STEP
        self.prefill_progress: Callable[[int], None] | None = None
        self.quantization: KVQuantization | None = None
        self.compiled: CompiledForward | None = None
        self.is_draft = False
        self.positions = position_table(model) or sys.maxsize
        check_supported(self.caches)
        if shape is not None:
            check_fixed(self.caches)
        check_single(self.caches)
        if len(self.caches) != len(native):
            raise InvalidRequestError(
                f"{len(self.caches)} caches were passed, but the model needs "
                f"{len(native)}. Pass all that make_prompt_cache(model) returns."
            )
        self._unknown = (position(self.caches) or 0) - seen

    @property
    def room(self) -> int:
        """Largest number of tokens that the next round can feed.

        The limits are the model's positions, `shape` in exact mode, and the position at
        which the caches are quantized: a round must not see two kinds of keys.
        """
        quantization, end = self.quantization, self._unknown + self.seen
        room = None if quantization is None else quantization.room(self.caches)
        room = min(self.positions - end, sys.maxsize if room is None else room)
        return room if self.shape is None else min(room, self.shape.room(end))

    def begin(self, count: int = 1, *, whole: bool = False) -> "LaneRound":
        """Open a round, see `RequestLane`.

        Raises:
            InvalidRequestError: something else has written to the caches.
        """
        lane_round = LaneRound(self, whole=whole)
        start = lane_round.start
        if start is not None and start != self._unknown + self.seen:
            raise InvalidRequestError(
                f"The caches hold {start} tokens, but this stream has left "
                f"{self._unknown + self.seen} in them: something else has changed "
                "them. Use caches in one stream only."
            )
        return lane_round

    def join(self, lanes: Sequence[RequestLane]) -> BatchLane:
        """Return a new batch with this request and those of other lanes."""
        return BatchLane(self.model, self.sizes).join([self, *lanes])

    def count_bytes(self, speculation: Speculation, width: int, whole: bool) -> None:
        """Update `round_bytes`; chunks of a prompt are not counted.

        Bytes are counted in each round that is wider than all before it, and once in
        `COUNTED_EVERY` rounds.
        """
        if whole and width > 1:
            return
        self._rounds += 1
        if width > self._widest or self._rounds % COUNTED_EVERY == 0:
            self._widest = max(self._widest, width)
            self.round_bytes = max(self.round_bytes, speculation.nbytes)

    def resume(self, snapshot: Snapshot) -> None:
        """Restore the caches from a snapshot that begins at the first token."""
        restore(snapshot, self.caches)
        self.seen = snapshot.stop

    def skip(self, count: int) -> None:
        """Skip the next `count` tokens, which the caches will not hold."""
        self.seen += count
        self._unknown -= count

    def feed(
        self,
        tokens: Sequence[int],
        step: int | None = None,
        each: Callable[[Sequence[int], States], None] | None = None,
        fits: Callable[[int], bool] | None = None,
    ) -> bool:
        """Feed and commit tokens in chunks; return whether all were fed.

        Chunks have at most `step` tokens (None: `prefill_step`), and at most `room` in
        exact mode. With `points`, chunks also end where a restore point is due. An
        error leaves the caches at the end of the last finished chunk. If the rest is
        fed later, its chunks end where they would have ended without the error.

        `each` is called with every kept chunk and the chunk's evaluated hidden states,
        and needs `taps`. `fits` is called with the length of every chunk before the
        chunk is fed. If `fits` returns False, feeding ends.
        """
        check_positions(len(tokens), self._unknown + self.seen, self.positions)
        start, step = 0, step or self.prefill_step
        while start < len(tokens):
            points = self.points
            width = step if points is None else points.next_chunk(self.seen, step)
            if self.shape is not None:
                width = min(width, self.room)
            chunk = tokens[start : start + width]
            if fits is not None and not fits(len(chunk)):
                return False
            with self.begin(whole=True) as lane_round:
                lane_round.forward(mx.array(list(chunk)))
                shows = self.shows or each is not None
                shown = lane_round.hidden.arrays if shows else []
                mx.eval(states(lane_round.speculation.caches), shown)
                lane_round.commit(len(chunk))
            if lane_round.replaced:
                mx.eval(states(self.caches))  # lazy ones would keep old arrays alive
            start += len(chunk)
            if each is not None:
                each(chunk, lane_round.hidden)
            if self.follower is not None:
                self.follower.chunk_done()
            if points is not None:
                points.take(self.caches, self.seen)
            if len(chunk) > 1 and self.shape is None:  # chunks of exact mode are short
                mx.clear_cache()
            if self.prefill_progress is not None:
                self.prefill_progress(len(chunk))
            checkpoint()
        return True


class LaneRound(RequestRound):
    """A round of one request, see `RequestRound`."""

    def __init__(self, lane: Lane, *, whole: bool = False) -> None:
        self._lane, self._whole = lane, whole
        self._fed: list[mx.array] = []
        self._width = 0
        self._taps = lane.taps if lane.follower is None else lane.follower.taps
        self._hidden = None if self._taps is None else self._taps.states()
        self._again: list[Speculation] = []
        # Not a method of this object: the reference cycle would keep old states alive.
        rerun = None if whole else partial(_feed_again, lane, self._fed, self._again)
        if lane.shape is not None:  # not whole, since padding is not kept
            self._whole = whole = False
            if lane.quantization is not None:  # all rows have to see quantized keys
                lane.quantization.replace(lane.caches)
            self.speculation = Speculation(lane.caches, shape=lane.shape)
        else:
            self.speculation = Speculation(
                lane.caches,
                whole=whole,
                rerun=rerun,
                key_steps=lane.key_steps and not whole,
            )
        self.start = self.speculation.start  # None: unknown
        self._committed = 0
        self._prepared: int | None = None
        self._mixers_ran = False
        self.replaced: Replaced = []  # caches that the commit quantized

    def forward(self, tokens: mx.array) -> mx.array:
        """Feed tokens [n] or [1, n]; return logits [n, vocab] or [1, n, vocab]."""
        lane, n, batched = self._lane, tokens.shape[-1], tokens.ndim == 2
        tokens = tokens[0] if batched else tokens
        self._width += n
        if self._width > lane.positions - lane._unknown - lane.seen:
            check_positions(self._width, lane._unknown + lane.seen, lane.positions)
        self._fed.append(tokens)
        if lane.shape is not None:
            logits = self._fixed(tokens, lane.shape)[None]
        elif lane.compiled and lane.compiled.serves(lane.caches, n):
            logits = lane.compiled.forward(tokens, lane.caches)[None]
        else:
            whole = self._whole and not lane.is_draft  # plain step or part of a prompt
            way: Any = plain_step(n) if whole else rows_of_a_round(lane.part)
            taps = NOTHING if self._taps is None else self._taps.collect(self._hidden)
            with taps, way:
                logits = lane.run(tokens[None], cache=self.speculation.caches)
        return logits if batched else logits.squeeze(0)

    def _fixed(self, tokens: mx.array, shape: FixedShape) -> mx.array:
        """Feed `tokens` [n] with padding; return their logits [n, vocab]."""
        count, lane = tokens.shape[0], self._lane
        assert len(self._fed) == 1, "a round in exact mode is one forward"
        assert count <= lane.room, f"{count} tokens, and room for {lane.room}"
        padding = mx.zeros(shape.rows - count, tokens.dtype)
        rows = mx.concatenate([tokens, padding])[None]
        taps = NOTHING if self._taps is None else self._taps.collect(self._hidden)
        with fixed_shape_forward(count), taps:
            logits: mx.array = lane.model(rows, cache=self.speculation.caches)
        if self._hidden is not None:
            self._hidden.cut(count)
        return logits[0, :count]

    def prepare(self, keep: Keep) -> None:
        """Do every step of `commit(keep)` that can fail."""
        keep = keep if isinstance(keep, int) else keep[0]
        if self._whole or self.speculation.only_kv:
            self.speculation.prepare(keep)
        else:
            with noting_reruns() as ran:
                self.speculation.prepare(keep)
            self._mixers_ran = bool(ran)
            if ran and self._lane.shape is not None:
                raise UnsupportedModelError(
                    f"{type(ran[0]).__name__} would have to run again over {keep} "
                    f"rows, but exact mode always feeds {self._lane.shape.rows}. Leave "
                    "exact out for this model."
                )
        self._prepared = keep

    def commit(self, keep: Keep) -> None:
        """Keep the first `keep` tokens fed."""
        keep = keep if isinstance(keep, int) else keep[0]
        # In a whole round, `speculation.commit` prepares by itself.
        if self._prepared != keep and not self._whole:
            self.prepare(keep)
        lane, speculation = self._lane, self.speculation
        lane.count_bytes(speculation, self._width, self._whole)
        speculation.commit(keep)
        self._committed = keep
        if lane.follower is not None and self._hidden is not None:
            follower = lane.follower
            follower.add(lane.seen, follower.select(self._hidden), keep)
        lane.seen += keep
        lane.reruns += speculation.reran
        lane.mixer_reruns += self._mixers_ran
        if lane.quantization is not None:
            self.replaced = lane.quantization.replace(lane.caches)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.speculation.__exit__(*error)

    def rollback(self) -> None:
        """Undo every forward, even after a commit if nothing has been written since."""
        for place, cache in self.replaced:
            self._lane.caches[place] = cache
        self.replaced = []
        self.speculation.rollback()
        for again in self._again:  # reruns of the model have written too
            again.rollback()
        self._lane.seen -= self._committed
        if self._lane.follower is not None and self._committed:
            self._lane.follower.take_back(self._lane.seen)
        self._committed = 0


def _feed_again(
    lane: Lane, fed: list[mx.array], done: list[Speculation], keep: int
) -> None:
    """Feed the first `keep` of the fed tokens to caches that were rolled back."""
    tokens = mx.concatenate(fed)[:keep]
    with Speculation(lane.caches, whole=True) as again:
        lane.run(tokens[None], cache=again.caches)
        again.commit(keep)
    done.append(again)

"""The drafter that is an MTP head of the target.

The head pairs the state of each position with the token after it. With t_n the newest
known token, h_i the target's states and k = 3:

    slots 0 .. m-1     in the head's caches: pairs (h_i, t_i+1) of committed text
    slots m .. n-1     pairs that were committed since; the last one gives d_1
    slots n, n+1       pairs (g, d_1) and (g, d_2), with g the head's own state of the
                       slot before; they give d_2 and d_3

Slots m to n-1, the refresh and the first draft, are one batch, of which only the last
row is more than keys and values. See `models/mtp/cache.py` for what stays.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.engine.drafters.base import Choose, Draft, goes_on
from mlx_speculation.engine.drafters.source import (
    DraftOptions,
    HeadSource,
    TargetInfo,
    check_embedding,
)
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.models import (
    CommittedStates,
    HiddenStates,
    Lane,
    MtpConvention,
    ReducedEnds,
    States,
)
from mlx_speculation.models.checkpoints import HeadCache, HeadOnTarget
from mlx_speculation.models.mtp import (
    Mtp,
    MtpCache,
    MtpHead,
    is_split_head,
    load_mtp_head,
)
from mlx_speculation.samplers import Chosen

# More slots than this are fed by themselves, and not in a batch with a first draft.
LONGEST_LAG = 64


class MtpDraft(HeadSource):
    """An MTP head on its target, as the draft of a generator.

        model, tokenizer = load(folder)
        draft = MtpDraft.from_folder(folder, model)
        generator = SpeculativeGenerator(model, tokenizer, draft=draft)

    Args:
        model: the target.
        head: its head.
        ids: token ids to draft from, such as `reduced_vocabulary` returns; None: all.

    Raises:
        UnsupportedModelError: the target does not show the states that the head reads,
            or cannot have fewer logits.
    """

    kind = "mtp"
    reducible = True
    fits = staticmethod(is_split_head)

    def __init__(
        self, model: nn.Module, head: MtpHead, *, ids: SequenceOf[int] | None = None
    ) -> None:
        self._before = head.convention.hidden == "before_norm"
        self._taps = HiddenStates(
            model, before_norm=self._before, after_norm=not self._before
        )
        self._ids = None if ids is None else mx.array(list(ids), mx.uint32)
        ends: HiddenStates | ReducedEnds = self._taps
        self._rows: nn.Module | None = None
        if ids is not None:
            ends = ReducedEnds(self._taps, ids)
            self._rows = ends.layer
        self.model, self.mtp = model, Mtp(head, ends, ids=self._ids)
        self._head = head

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        model: nn.Module,
        *,
        convention: MtpConvention | None = None,
        tokenizer: Any = None,
        split: Path | None = None,
    ) -> "MtpDraft":
        """Load the head that is in a target's folder; see `load_mtp_head`."""
        head = load_mtp_head(
            folder, model, convention=convention, tokenizer=tokenizer, split=split
        )
        return cls(model, head)

    @classmethod
    def load(
        cls,
        folder: Path,
        target: TargetInfo,
        convention: MtpConvention | None = None,
        trust_remote_code: bool = False,
    ) -> "MtpDraft":
        """Load a head out of the target's folder or one of its own."""
        own = target.folder or Path()
        return cls.from_folder(
            own,
            target.model,
            convention=convention,
            tokenizer=target.tokenizer,
            split=None if folder == own else folder,
        )

    def check_ids(self, highest: int) -> None:
        """Refuse a head of other token ids; see `HeadSource`."""
        for layer in self._head.layers:
            if "embedding" in layer:
                check_embedding(layer.embedding, "MTP head", highest)

    @property
    def own_weights(self) -> nn.Module:
        """The head's own; embedding and output layer of the target are not in it."""
        return self._head

    @property
    def reduced_rows(self) -> nn.Module | None:
        """The rows of the target's output layer for the ids to draft from, if any."""
        return self._rows

    @property
    def ends_early(self) -> bool:
        """Whether its drafts may; see `engine.drafters.early_stop`.

        Layers of a chain all run.
        """
        return not self._head.chained

    def reduced(self, ids: SequenceOf[int]) -> "MtpDraft":
        """Return a draft of the same head that drafts from some token ids only."""
        return MtpDraft(self.model, self._head, ids=ids)

    def configured(self, options: DraftOptions) -> "MtpDraft":
        """Return the head with a reduced vocabulary, if there is one."""
        ids = options.vocabulary
        return self if ids is None else self.reduced(ids)

    def open(
        self, lane: Lane, sequence: Sequence, draft_cache: list[Any] | None = None
    ) -> "MtpDrafter":
        """Return the drafter of one stream, which follows the target's lane."""
        committed = CommittedStates(self._taps, self._select)
        lane.follower = committed
        slots = partial(MtpCache, self.mtp)
        depth = self.mtp.head.depth
        return MtpDrafter(slots, sequence, committed, depth=depth, ids=self._ids)

    def _select(self, found: States) -> mx.array:
        return found.before_norm if self._before else found.after_norm


class MtpDrafter:
    """Drafts with a head in one stream.

    It reads the states of the positions that the target's lane commits. Those of
    tokens out of a passed cache or a prefix cache are not in its history.

    Args:
        new_slots: makes caches of the head that begin at a slot.
        sequence: the known tokens.
        committed: the states that were committed and not read yet.
        depth: the most drafts that the head is good for; None: any number.
        source: the kind of drafter, which the statistics count by.
        ids: the target's ids of the head's logits, uint32 [n]; None: all.

    Attributes:
        committed: the same.
        depth: the same.
        source: the same.
        ids: the same.
    """

    def __init__(
        self,
        new_slots: Callable[[int], HeadCache],
        sequence: Sequence,
        committed: CommittedStates,
        *,
        depth: int | None = None,
        source: str = "mtp",
        ids: mx.array | None = None,
    ) -> None:
        self._new_slots, self._tokens = new_slots, sequence.tokens
        self.depth, self.source, self.ids = depth, source, ids
        self.committed = self._committed = committed
        self._slots = new_slots(0)
        self._chunk_end = 0
        committed.after_chunk(self._read_chunk)

    @property
    def history(self) -> range:
        """The slots of committed text that the head's caches hold."""
        return range(self._slots.first, self._slots.end)

    @property
    def held(self) -> list[Any]:
        """Caches, and states of the target to be read, for a count of bytes."""
        return [self._slots.held, self._committed.arrays]

    @property
    def mtp(self) -> HeadOnTarget | None:
        """The head, if it can draft for several rows at once; see `BatchMtpCache`."""
        slots = self._slots
        if isinstance(slots, MtpCache) and not slots.mtp.head.chained:
            return slots.mtp
        return None

    def begin(self, sequence: Sequence) -> None:
        """Read the states of the prompt, which is fed by now."""
        self._catch_up()

    def hand_over(self) -> tuple[MtpCache, mx.array | None]:
        """Return what a batch needs to draft in its place, which calls `let_go` then.

        Returns:
            Its slots, and the states that come after them, at most one, [1, 1, dim].
        """
        self._catch_up(0)
        slots, committed = self._slots, self._committed
        assert isinstance(slots, MtpCache)
        if slots.end >= committed.stop:
            return slots, None
        return slots, committed.between(slots.end, committed.stop)

    def let_go(self) -> None:
        """Let go of what it holds, as if it had seen nothing of the text."""
        self._slots = self._new_slots(self._committed.stop)
        self._committed.drop(self._committed.stop)

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Draft:
        """Bring the caches up to the known tokens, and draft behind them.

        Nothing is proposed where the state before the newest token was never seen,
        since it is out of a passed cache.
        """
        self._catch_up()
        newest = len(self._tokens) - 1
        if not self._committed.start < newest <= self._committed.stop:
            return Draft(mx.array([], mx.uint32), source=self.source)
        chosen: list[Chosen] = []

        def choose_next(logits: mx.array) -> tuple[mx.array, bool]:
            ahead = Draft.of(chosen).tokens if chosen else None
            chosen.append(choose(logits, sequence.rows(ahead), self.ids))
            token = chosen[-1].tokens  # computed while the next graph is built
            return token, goes_on(choose, token)

        def tokens_of(layer: int, first: int, count: int) -> mx.array:
            return self._pairs(layer, first, count, chosen)

        self._slots.draft(
            self._committed.between(self._slots.end, newest),
            newest,
            tokens_of,
            choose_next,
            limit if self.depth is None else min(limit, self.depth),
        )
        return Draft.of(chosen, source=self.source)

    def settle(self, accepted: int) -> None:
        """Keep the slots of committed text; those of drafts never stay."""
        self._slots.commit()

    def discard(self) -> None:
        """Undo the round."""
        self._slots.rollback()

    def _pairs(
        self, layer: int, first: int, count: int, chosen: list[Chosen]
    ) -> mx.array:
        """Return the tokens that a layer pairs with slots, drafts at the end."""
        start = first + layer + 1
        known = mx.array(self._tokens[start : start + count], mx.uint32)
        drafts = [one.tokens for one in chosen[max(0, start - len(self._tokens)) :]]
        return mx.concatenate([known, *drafts])[None, :count]

    def _read_chunk(self) -> None:
        """Read the chunk before the newest: for that the first token need not wait."""
        before, self._chunk_end = self._chunk_end, self._committed.stop
        self._catch_up(until=before)

    def _catch_up(self, longest: int | None = None, until: int | None = None) -> None:
        """Drop the states that were read; feed the others where they are many.

        The slot of the first draft, and what comes after it, is left.

        Args:
            longest: so many may be left; `LONGEST_LAG` when omitted.
            until: what comes from this slot on is left too; None: nothing.
        """
        committed = self._committed
        if committed.start > self._slots.end or committed.stop < self._slots.end:
            self._slots = self._new_slots(committed.start)
        committed.drop(self._slots.end)
        stop = min(len(self._tokens) - 2, committed.stop)
        stop = stop if until is None else min(stop, until)
        lag = max(stop - self._slots.end, self._slots.lag)
        most = LONGEST_LAG if longest is None else longest
        if lag <= most or stop <= self._slots.end:
            return
        hidden = committed.between(self._slots.end, stop)
        try:
            self._slots.feed(hidden, stop, self._known_pairs)
        except Exception:  # after Ctrl-C they are as before, and can be fed again
            self._slots = self._new_slots(committed.stop)
            raise
        committed.drop(stop)
        mx.eval(committed.arrays)

    def _known_pairs(self, layer: int, first: int, count: int) -> mx.array:
        return self._pairs(layer, first, count, [])

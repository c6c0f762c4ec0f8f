"""The drafter with an MTP head of the target.

At each position the head reads the target's hidden state and the next token. With
t_n the newest known token, h_i the target's states and k = 3 drafted tokens:

    positions 0 .. m-1    pairs (h_i, t_i+1) in the head's KV cache
    positions m .. n-1    pairs that the cache lacks; the last one gives d_1
    positions n, n+1      pairs (g, d_1) and (g, d_2), with g the head's own state of
                          the position before; they give d_2 and d_3

One forward reads positions m to n-1. It computes logits for the last one, and only keys
and values for the others. `models/mtp/rounds.py` says which positions are kept.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from operator import attrgetter
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.caches import Snapshot
from mlx_speculation.engine.drafters.base import (
    Branches,
    Choose,
    DraftChain,
    OpenDrafter,
    Proposal,
)
from mlx_speculation.engine.drafters.draft import (
    DraftOptions,
    HeadDraft,
    TargetInfo,
    check_embedding,
)
from mlx_speculation.engine.drafters.fault_guard import CheckedChoose
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.models import (
    CommittedStates,
    HiddenStates,
    Lane,
    MtpConvention,
    ReducedEnds,
)
from mlx_speculation.models.checkpoints import HeadState, ParallelHead
from mlx_speculation.models.mtp import (
    HeadCache,
    Mtp,
    MtpCache,
    MtpHead,
    is_split_head,
    load_mtp_head,
)
from mlx_speculation.models.mtp.tree_growth import Level, grow

# If more positions than this are unread, a forward of their own feeds them first.
LONGEST_LAG = 64


class MtpDraft(HeadDraft):
    """An MTP head on its target, as the draft of a generator.

        model, tokenizer = load(folder)
        draft = MtpDraft.from_folder(folder, model)
        generator = SpeculativeGenerator(model, tokenizer, draft=draft)

    Args:
        model: the target.
        head: its head.
        ids: token ids to draft from, such as `reduced_vocabulary` returns; None: all.

    Raises:
        UnsupportedModelError: the target's structure does not give access to the
            states that the head reads, or, with `ids`, to single rows of the output
            layer.
    """

    kind = "mtp"
    on_ranks = True
    reducible = True
    head: MtpHead
    fits = staticmethod(is_split_head)

    def __init__(
        self, model: nn.Module, head: MtpHead, *, ids: SequenceOf[int] | None = None
    ) -> None:
        before = head.convention.hidden == "before_norm"
        self.taps = HiddenStates(model, before_norm=before, after_norm=not before)
        self._states = attrgetter(head.convention.hidden)
        self._ids = None if ids is None else mx.array(list(ids), mx.uint32)
        ends: HiddenStates | ReducedEnds = self.taps
        self._rows: nn.Module | None = None
        if ids is not None:
            ends = ReducedEnds(self.taps, ids)
            self._rows = ends.layer
        self.model, self.head = model, head
        self.mtp = Mtp(head, ends, ids=self._ids)

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
    def load(cls, folder: Path, target: TargetInfo) -> "MtpDraft":
        """Load a head from the target's folder, or from its own folder."""
        folder_of_target = target.folder or Path()
        return cls.from_folder(
            folder_of_target,
            target.model,
            convention=target.convention,
            tokenizer=target.tokenizer,
            split=None if folder == folder_of_target else folder,
        )

    def check_ids(self, highest: int) -> None:
        """Refuse a head that lacks an embedding of a token id; see `HeadDraft`."""
        for layer in self.head.layers:
            if "embedding" in layer:
                check_embedding(layer.embedding, highest)

    @property
    def reduced_rows(self) -> nn.Module | None:
        """The rows of the target's output layer for a reduced vocabulary, if any."""
        return self._rows

    @property
    def reads_output(self) -> bool:
        """Return whether the head has no output layer of its own."""
        return self.mtp.reads_output

    def take_output(self, output: nn.Module) -> None:
        """Use this output layer, since the target's is sharded over ranks."""
        self.mtp.take_output(output)

    def configured(self, options: DraftOptions) -> "MtpDraft":
        """Return the draft, with a reduced vocabulary if the options have one."""
        ids = options.vocabulary
        return self if ids is None else MtpDraft(self.model, self.head, ids=ids)

    def new_cache(self, first: int) -> MtpCache:
        """Return caches of the head; see `Draft`."""
        return MtpCache(self.mtp, first)

    def open(
        self, lane: Lane, sequence: Sequence, draft_cache: list[Any] | None = None
    ) -> "MtpDrafter":
        """Return the drafter of one stream, which follows the target's lane."""
        return MtpDrafter(
            self.new_cache,
            sequence,
            self.following(lane, self._states),
            depth=self.mtp.head.depth,
            ids=self._ids,
        )


class MtpDrafter(OpenDrafter):
    """Drafts with a head in one stream.

    The head reads the states of positions that the target's lane commits. The states of
    tokens that were in a passed cache or a prefix cache are missing.
    """

    def __init__(
        self,
        # Makes KV caches of the head that begin at a position
        new_cache: Callable[[int], HeadCache],
        sequence: Sequence,  # the known tokens
        committed: CommittedStates,  # committed states that the head has yet to read
        *,
        # The largest number of tokens that the head can draft in a round; None: any
        depth: int | None = None,
        source: str = "mtp",  # the kind of drafter; the statistics count by it
        # The target's token id of each logit of the head, uint32 [n]; None: all ids
        ids: mx.array | None = None,
        trees: bool = False,  # whether it can draft trees, see `EagleDraft`
    ) -> None:
        self._trees = trees
        self._new_cache, self._tokens = new_cache, sequence.tokens
        self.depth, self.source, self.ids = depth, source, ids
        self.committed = committed
        self._cache = new_cache(0)
        self._chunk_end = 0
        committed.after_chunk(self._read_chunk)

    @property
    def history(self) -> range:
        """The positions of committed text that the head's caches hold."""
        return range(self._cache.first, self._cache.end)

    @property
    def held(self) -> list[Any]:
        """The caches and the unread states of the target, for a count of bytes."""
        return [self._cache.held, self.committed.arrays]

    @property
    def prefix_head(self) -> "MtpDrafter":
        """This drafter; see `OpenDrafter`."""
        return self

    batch_head = prefix_head

    @property
    def again(self) -> int:
        """The number of tokens that a resumed head reads again; see `fed_again`."""
        return self._cache.again

    def kept(self) -> tuple[list[Any], int] | None:
        """Return the caches and the number of rows to keep; see `HeadCache`."""
        return self._cache.kept()

    def level(self) -> None:
        """Feed the unread rest of a finished text to the head."""
        cache, committed = self._cache, self.committed
        stop = min(len(self._tokens) - 1, committed.stop)
        if committed.start <= cache.end < stop:
            cache.feed(committed.between(cache.end, stop), stop, self._tokens)

    def resume(self, snapshot: Snapshot) -> None:
        """Continue from kept cache rows of a prefix of the text."""
        self._cache = self._new_cache(0)
        self._cache.resume(snapshot)

    def begin(self, sequence: Sequence) -> None:
        """Feed the prompt's states to the head if they are many; see `_catch_up`."""
        self._catch_up()

    def hand_over(self) -> HeadCache:
        """Return the caches for a shared head; at most one state is left unread.

        The shared head copies these caches, and then calls `handed_over`.
        """
        self._catch_up(0)
        return self._cache

    def handed_over(self) -> None:
        """Release the caches, which a shared head holds from now on."""
        self._cache = self._new_cache(self.committed.stop)

    def take_back(self, first: int, layers: list[list[Any]], state: HeadState) -> None:
        """Take caches back from a shared head; see `HeadCache`."""
        self._cache = self._new_cache(first)
        self._cache.take(layers, state)

    def on_target(self, requests: SequenceOf[Any]) -> ParallelHead:
        """Return the head on its target, to draft for several requests together."""
        head: ParallelHead = self._cache.mtp
        return head

    def let_go(self) -> None:
        """Release the caches and all states, as if the head had read no text."""
        self.handed_over()
        self.committed.drop(self.committed.stop)

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        """Feed the unread states to the head, and draft after the newest token.

        Proposes nothing if the state of the token before the newest token is missing,
        because a passed cache already held that token.
        """
        self._catch_up()
        newest = len(self._tokens) - 1
        if not self.committed.start < newest <= self.committed.stop:
            return Proposal(mx.array([], mx.uint32), source=self.source)
        if getattr(choose, "tree", 0) and self._trees:
            assert isinstance(choose, CheckedChoose)
            return self._tree(sequence, limit, choose, newest)
        chain = DraftChain(choose, sequence)

        def choose_next(logits: mx.array, ids: mx.array | None = None) -> mx.array:
            ids = self.ids if ids is None else ids
            return chain.add(
                logits, ids[0] if ids is not None and ids.ndim > 1 else ids
            )

        self._cache.draft(
            self.committed.between(self._cache.end, newest),
            newest,
            self._tokens,
            choose_next,
            limit if self.depth is None else min(limit, self.depth),
        )
        return Proposal.of(chain.chosen, source=self.source)

    def _tree(
        self, sequence: Sequence, limit: int, choose: CheckedChoose, newest: int
    ) -> Proposal:
        """Draft a tree of at most `limit` levels."""
        assert isinstance(self._cache, MtpCache)
        round_ = self._cache.draft_tree(
            self.committed.between(self._cache.end, newest),
            newest,
            self._tokens,
        )
        ahead: list[mx.array] = []  # one placeholder for each earlier level

        def children(count: int) -> tuple[mx.array, mx.array]:
            before = mx.concatenate(ahead) if ahead else None
            ahead.append(mx.zeros(1, mx.uint32))
            rows = sequence.rows(before)
            return choose.children(round_.logits, rows, count, self.ids)

        def run(level: Level) -> None:
            mx.async_eval(level.tokens)  # computed while the next graph is built
            round_.run(*level)

        levels = limit if self.depth is None else min(limit, self.depth)
        tokens, parents = grow(children, run, choose.tree, levels)
        return Proposal(tokens, source=self.source, branches=Branches(parents, levels))

    def settle(self, accepted: int) -> None:
        """Keep the cache rows of committed text, and drop those of drafted tokens."""
        self._cache.commit()

    def discard(self) -> None:
        """Undo the round."""
        self._cache.rollback()

    def _read_chunk(self) -> None:
        """Read all chunks but the newest, which would delay the first token."""
        before, self._chunk_end = self._chunk_end, self.committed.stop
        self._catch_up(until=before)

    def _catch_up(self, longest: int | None = None, until: int | None = None) -> None:
        """Drop the states that the head has read, and feed the others if they are many.

        The last state, which the next draft begins with, is left unread.

        Args:
            longest: how many states before the last one may remain unread; None:
                `LONGEST_LAG`.
            until: states from this position on remain unread too; None: no others.
        """
        committed = self.committed
        # States to keep although they were read, see `engine.prefix_reuse`
        spare = self._cache.again - 1
        if committed.start > self._cache.end or committed.stop < self._cache.end:
            self._cache = self._new_cache(committed.start)
        committed.drop(self._cache.end - spare)
        stop = min(len(self._tokens) - 2, committed.stop)
        stop = stop if until is None else min(stop, until)
        lag = max(stop - self._cache.end, self._cache.lag)
        most = LONGEST_LAG if longest is None else longest
        if lag <= most or stop <= self._cache.end:
            return
        hidden = committed.between(self._cache.end, stop)
        try:
            self._cache.feed(hidden, stop, self._tokens)
        except Exception:  # Ctrl-C is not caught: the states can be fed again
            self._cache = self._new_cache(committed.stop)
            raise
        committed.drop(stop - spare)
        mx.eval(committed.arrays)

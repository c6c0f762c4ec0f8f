"""The drafter with a smaller model that has the target's token ids."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.caches import check_single, check_supported, leaves, position
from mlx_speculation.engine.drafters.base import (
    NOTHING,
    Choose,
    DraftChain,
    OpenDrafter,
    Proposal,
)
from mlx_speculation.engine.drafters.draft import (
    DraftOptions,
    FolderDraft,
    TargetInfo,
)
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import (
    Lane,
    ReducedOutput,
    RequestLane,
    check_same_ids,
    find_parts,
    load,
    logit_width,
    position_table,
)

# After a round the lane lacks one or two known tokens. Before the first draft and after
# rounds without a draft it can lack more. If it lacks more than this many, all but the
# last are fed before the draft, and are kept even if the round is rolled back.
LONGEST_LAG = 8
# The proposal if the model's position table is full.
PAUSED = replace(NOTHING, source="model")


class ModelDraft(FolderDraft):
    """A draft model, as the draft of a generator.

    Args:
        model: an mlx-lm model with the target's token ids.
        options: the generator's options; None: the defaults.
    """

    kind = "model"
    reducible = True

    def __init__(self, model: nn.Module, options: DraftOptions | None = None) -> None:
        self.model = model
        self._options = options = options or DraftOptions()
        self._reduced: ReducedOutput | None = None
        if options.vocabulary is not None:
            self._reduced = ReducedOutput(find_parts(model), options.vocabulary)
        self._compiled = None if options.compiled is None else options.compiled(model)

    @staticmethod
    def fits(config: dict[str, Any]) -> bool:
        """Return True: a folder that fits no other draft holds a draft model."""
        return True

    @classmethod
    def load(cls, folder: Path, target: TargetInfo) -> "ModelDraft":
        """Load a model; see `FolderDraft`."""
        model, tokenizer = load(folder, trust_remote_code=target.trust_remote_code)
        check_same_ids(target.tokenizer, tokenizer)
        return cls(model)

    @property
    def models(self) -> list[nn.Module]:
        """The model."""
        return [self.model]

    @property
    def own_weights(self) -> nn.Module:
        """The model."""
        return self.model

    @property
    def reduced_rows(self) -> nn.Module | None:
        """The rows of its output layer for a reduced vocabulary; None: not reduced."""
        return None if self._reduced is None else self._reduced.layer

    def check(self, target: TargetInfo) -> None:
        """Refuse a draft model whose logits lack some token of the target."""
        width = logit_width(self.model)
        if width <= target.highest_id:
            raise InvalidRequestError(
                f"The draft has {width} token ids, and the target's go up to "
                f"{target.highest_id}. Choose a draft that knows every token of the "
                "target."
            )

    def configured(self, options: DraftOptions) -> "ModelDraft":
        """Return the model with these options.

        Raises:
            UnsupportedModelError: the model cannot be compiled, or cannot compute the
                logits of only some ids.
        """
        return ModelDraft(self.model, options)

    def open(
        self, lane: Lane, sequence: Sequence, draft_cache: list[Any] | None = None
    ) -> OpenDrafter:
        """Return the drafter of one stream.

        Raises:
            InvalidRequestError: `draft_cache` does not fit the target's caches.
        """
        step, options = lane.prefill_step, self._options

        def make(*caches: Any) -> Lane:
            lane = Lane(self.model, *caches, sliding=options.sliding)
            lane.prefill_step = step
            lane.compiled = self._compiled
            lane.is_draft = True
            return lane

        if draft_cache is None:
            first = make()
        else:
            check_supported(draft_cache)
            check_single(draft_cache)
            _check_apart(lane.caches, draft_cache)
            count, whole = position(draft_cache), sequence.start + lane.seen
            if count is not None and position_table(self.model) == count < whole:
                count = None  # its position table is full: it drafts no more
            seen = _checked_lag(count, lane.seen, sequence.start)
            first = make(draft_cache, seen)
        return ModelDrafter(make, first, reduced=self._reduced)


class ModelRound:
    """Chains of drafted tokens for all requests of a draft model's lane.

    Args:
        lane: the lane.
        count: the largest number of tokens that `draft` feeds for each request.
    """

    def __init__(self, lane: RequestLane, count: int) -> None:
        self._round = lane.begin(count)
        self._lag = self._fed = 0

    def draft(
        self, unseen: mx.array, count: int, choose: Callable[[mx.array], mx.array]
    ) -> None:
        """Draft `count` tokens for each request, in one forward for each token.

        Args:
            unseen: the known tokens that the lane lacks, uint32 [requests, n].
            count: at least 1.
            choose: gets logits [requests, vocab]; returns the next tokens, [requests].
        """
        self._lag = unseen.shape[1]
        for fed in range(count):
            logits = self._round.forward(unseen)[:, -1]
            self._fed = fed
            unseen = choose(logits)[:, None]

    def commit(self, accepted: SequenceOf[int], *, even: bool = False) -> None:
        """Keep known and accepted tokens; not the last drafted one, which was not fed.

        Args:
            accepted: how many drafted tokens of each request are accepted.
            even: whether the lane shall lack two tokens of every request. Else it lacks
                one, or two if all drafted tokens are accepted.
        """
        lag, fed = self._lag, self._fed
        self._round.commit([lag - even + min(n, fed + even) for n in accepted])

    def rollback(self) -> None:
        """Undo the round, even after a commit. Never raises."""
        self._round.rollback()


class ModelDrafter(OpenDrafter):
    """Drafts for one request with a draft model.

    Args:
        make_lane: makes a new lane of the draft model with empty caches.
        lane: the lane of the first `begin`, which may hold tokens; None: a new one.
        reduced: the output layer for a reduced vocabulary; None: all token ids.
    """

    def __init__(
        self,
        make_lane: Callable[[], Lane],
        lane: Lane | None = None,
        *,
        reduced: ReducedOutput | None = None,
    ) -> None:
        self._make_lane = make_lane
        self._first_lane = lane
        self._lane = lane or make_lane()
        self._round: ModelRound | None = None
        self._reduced = reduced

    @property
    def lane(self) -> Lane:
        """The draft model's lane."""
        return self._lane

    @property
    def lanes(self) -> list[Lane]:
        """The draft model's lane."""
        return [self._lane]

    @property
    def batch_lane(self) -> Lane | None:
        """The draft model's lane; None if its vocabulary is reduced."""
        return self._lane if self._reduced is None else None

    @property
    def held(self) -> list[Any]:
        """The caches, for a count of bytes."""
        return self._lane.caches

    def read_ahead(self, sequence: Sequence, fits: Callable[[int], bool]) -> bool:
        """Feed a part of the prompt to the lane, as much as `fits` allows."""
        lag = len(sequence.tokens) - self._lane.seen
        if lag <= LONGEST_LAG and not sequence.images:
            return True
        return self._feed(sequence, fits)

    def begin(self, sequence: Sequence) -> None:
        """Feed the prompt to a new lane, or in the first call to the passed lane."""
        self._lane = self._first_lane or self._make_lane()
        self._first_lane = None
        self._round = None
        if sequence.images:
            self._feed(sequence)
        else:
            self._catch_up(sequence)

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        """Feed the tokens that the lane has not seen, then draft `limit` tokens.

        Proposes fewer, or none, near the end of the model's position table.
        """
        self._round = None
        limit = min(limit, self._most(sequence))
        if limit <= 0:
            return PAUSED
        self._catch_up(sequence)
        unseen = mx.array([sequence.tokens[self._lane.seen :]])
        self._round = ModelRound(self._lane, unseen.shape[1] + limit - 1)
        chain, reduced = DraftChain(choose, sequence), self._reduced
        if reduced is None:
            self._round.draft(unseen, limit, chain.add)
        else:
            ids = reduced.ids
            with reduced.only():
                self._round.draft(unseen, limit, lambda each: chain.add(each, ids))
        return Proposal.of(chain.chosen, source="model")

    def _most(self, sequence: Sequence) -> int:
        """Return how many tokens can be drafted before the position table is full.

        0 or less: none. The last drafted token needs no position, nor do images.
        """
        lane = self._lane
        unseen = len(sequence.tokens) - lane.seen
        for start, stop in sequence.images:
            unseen -= max(0, stop - max(start, lane.seen))
        return lane.room - unseen + 1

    def _catch_up(self, sequence: Sequence) -> None:
        """Feed all unseen tokens but the last, if they are too many for a round."""
        if len(sequence.tokens) - self._lane.seen > LONGEST_LAG:
            self._feed(sequence)

    def _feed(
        self, sequence: Sequence, fits: Callable[[int], bool] | None = None
    ) -> bool:
        """Feed all unseen tokens except the last one and those that stand for images.

        The model reads the text as if it had no images. False: `fits` refused a chunk.
        """
        lane, tokens = self._lane, sequence.tokens
        if self._most(sequence) <= 0:
            return True  # the position table is too short for the text: no draft
        for start, stop in sequence.images:
            if lane.seen < start and not lane.feed(
                tokens[lane.seen : start], fits=fits
            ):
                return False
            if lane.seen < stop:
                lane.skip(stop - lane.seen)
        return lane.feed(tokens[lane.seen : -1], fits=fits)

    def settle(self, accepted: int) -> None:
        """Keep the known tokens and the accepted ones that the model was fed."""
        assert self._round is not None
        self._round.commit([accepted])

    def discard(self) -> None:
        """Undo the round."""
        if self._round is not None:
            self._round.rollback()
        self._round = None


def _checked_lag(known: int | None, seen: int, start: int) -> int:
    """Return how many tokens of the sequence the draft's caches hold.

    `known` is the offset of these caches, None if unknown; `start` + `seen` is the
    offset of the target's caches.
    """
    if known is None or known == start + seen:
        return seen
    if start == 0 and known < seen:
        return known
    raise InvalidRequestError(
        f"draft_cache holds {known} tokens and prompt_cache {start + seen}. Pass a "
        "draft_cache that holds the same tokens or, with cached_tokens, a prefix of "
        "them."
    )


def _check_apart(target: list[Any], draft: list[Any]) -> None:
    """Refuse a cache that both the target and the draft would write to."""
    places = {id(leaf): place for place, leaf in leaves(target)}
    for place, leaf in leaves(draft):
        if id(leaf) in places:
            raise InvalidRequestError(
                f"The cache of the draft's layer {place} is also the cache of the "
                f"target's layer {places[id(leaf)]}, a {type(leaf).__name__}. Make "
                "separate caches with make_prompt_cache(draft_model)."
            )

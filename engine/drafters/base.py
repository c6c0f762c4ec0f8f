"""What proposes tokens: a source for each generator, a drafter for each stream."""

import hashlib
import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import CompiledForward, Lane, Sliding
from mlx_speculation.samplers import Chosen, Rows


class Choose(Protocol):
    """What a drafter chooses with; see `Verifier.propose`."""

    def __call__(
        self, logits: mx.array, rows: Rows, ids: mx.array | None = None
    ) -> Chosen:
        """Choose one token per row of logits [rows, vocab], or [rows, n] of `ids`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Doubts:
    """What of a draft cannot be known before it is evaluated.

    Attributes:
        said: integers [k], the ids as the drafter named them.
        limit: the target has a row for ids below this.
        peaks: [rows], not finite where logits that it chose from are unusable; None
            where it asked for no choice.
    """

    said: mx.array
    limit: int
    peaks: mx.array | None = None

    @property
    def arrays(self) -> list[mx.array]:
        """What has to be evaluated."""
        return [self.said] if self.peaks is None else [self.said, self.peaks]

    def counts(self) -> tuple[int, int]:
        """Count the unusable rows of logits, and the ids that the target lacks.

        Legal when they have been evaluated; else it waits.
        """
        peaks: Any = [] if self.peaks is None else self.peaks.tolist()
        said: Any = self.said.tolist()
        rows = sum(not math.isfinite(peak) for peak in peaks)
        return rows, sum(not 0 <= token < self.limit for token in said)


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Proposed tokens, not read back to the host.

    Attributes:
        tokens: uint32 [k].
        probs: float32 [k, ids], the laws that `choose` named, one for each token; None
            where it named none, or where `choose` was not asked.
        source: the kind of drafter, which the statistics count by.
        reads: how often the host waited for the device while drafting.
        doubts: what cannot be known yet; `checked` sets it.
        certainties: where a draft may end early, the largest probability of each
            token's law; `checked` sets them, and they are submitted.
    """

    tokens: mx.array
    probs: mx.array | None = None
    source: str = "drafter"
    reads: int = 0
    doubts: Doubts | None = None
    certainties: tuple[mx.array, ...] = ()

    @classmethod
    def of(
        cls, chosen: SequenceOf[Chosen], *, source: str = "drafter", reads: int = 0
    ) -> "Draft":
        """Return the draft of these choices, at least one, in order."""
        tokens = mx.concatenate([one.tokens for one in chosen])
        laws = [one.probs for one in chosen if one.probs is not None]
        return cls(tokens, mx.concatenate(laws) if laws else None, source, reads)

    def behind(self, count: int) -> "Draft":
        """Return the draft without its first tokens."""
        probs = None if self.probs is None else self.probs[count:]
        return replace(self, tokens=self.tokens[count:], probs=probs)

    @property
    def length(self) -> int:
        """How many tokens were proposed."""
        return self.tokens.shape[0]

    @property
    def arrays(self) -> list[mx.array]:
        """What is submitted before the target's forward."""
        doubts = [] if self.doubts is None else self.doubts.arrays
        return [self.tokens, *doubts]


# Of a drafter that is not asked any more.
NOTHING = Draft(mx.array([], mx.uint32), source="nothing")


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens for one open stream at a time.

    `begin` comes first. The calls of a round are `propose`, then `settle` or
    `discard`, also when nothing was proposed. Rounds in which no draft is wanted make
    no call, so a drafter finds its place from the sequence. One that breaks its
    promises is disabled for the rest of the stream, see `engine.drafters.fault_guard`.
    """

    def begin(self, sequence: Sequence) -> None:
        """Start on a new sequence, and forget the last one. Called by prefill."""
        ...

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Draft:
        """Propose at most `limit` tokens that follow the sequence; none is an answer.

        `choose` holds the request's filters and noise; a drafter draws nothing
        itself, and names the laws that `choose` names. Committed state stays as it
        was until `settle`.
        """
        ...

    def settle(self, accepted: int) -> None:
        """Keep the first `accepted` proposed tokens. If it fails, it has kept none."""
        ...

    def discard(self) -> None:
        """Undo what the last `propose` and `settle` did. Never raises."""
        ...


class DrafterWrapper:
    """A drafter that has another one draft.

    Args:
        inner: the other one.
    """

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner

    @property
    def lanes(self) -> list[Lane | None]:
        """The lanes of the other one, see `lanes_of`."""
        return lanes_of(self.inner)


@runtime_checkable
class ReadsAhead(Protocol):
    """A drafter whose `begin` may take long, and be done in parts."""

    def read_ahead(self, sequence: Sequence, fits: Callable[[int], bool]) -> bool:
        """Before `begin`, read of the sequence what fits.

        Args:
            sequence: the one that `begin` will get; it may have grown by then.
            fits: asked whether a chunk of so many tokens may be read now.

        Returns:
            Whether `begin` has next to nothing left to read.
        """
        ...


def lanes_of(drafter: Any) -> list[Lane | None]:
    """Return the lanes of the draft models in a stream's drafter, in order.

    None stands for that of a disabled drafter: what it holds is not known.
    """
    return list(getattr(drafter, "lanes", ()))


@runtime_checkable
class Remembers(Protocol):
    """A drafter that keeps finished texts, to look later ones up in them."""

    def remember(self, tokens: SequenceOf[int]) -> None:
        """Keep prompt and output of a finished stream."""
        ...


def remember(drafter: Any, tokens: SequenceOf[int]) -> None:
    """Let a stream's drafter keep the tokens of the finished stream, if it does."""
    if isinstance(drafter, Remembers):
        drafter.remember(tokens)


@dataclass(frozen=True, slots=True, eq=False)
class TargetInfo:
    """The target that something is to draft for.

    Attributes:
        model: the target.
        tokenizer: its tokenizer.
        folder: where it was loaded from; None: it is not known.
        highest_id: the largest token id that its text may hold.
    """

    model: nn.Module
    tokenizer: Any
    folder: Path | None
    highest_id: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DraftOptions:
    """The options of a generator that its drafters follow.

    Attributes:
        sliding: what stands for sliding windows in the caches of draft models.
        confidence: where a draft model stops, see `DraftModel`.
        vocabulary: the token ids to draft from; None: all.
        compiled: returns the compiled forward of a draft model; None: they run as
            they are.
    """

    sliding: Sliding = "slack"
    confidence: float = 0.0
    vocabulary: SequenceOf[int] | None = None
    compiled: Callable[[nn.Module], CompiledForward] | None = None


@runtime_checkable
class DraftSource(Protocol):
    """A way to draft for one target: opens a drafter for each stream.

    What is not overridden holds for a drafter without a model.

    Attributes:
        kind: "model", "lookup", "mtp" and so on; what statistics count by.
        follows: whether its drafters read what the target computes.
        measurable: whether calibration measures its rounds, and not those of a
            stand-in, since how much it drafts depends on the text.
        reducible: whether it can draft from some token ids only.
    """

    kind: str = "drafter"
    follows: bool = False
    measurable: bool = True
    reducible: bool = False

    @property
    def reusable(self) -> bool:
        """Whether several of its drafters may be open at once."""
        return True

    @property
    def ends_early(self) -> bool:
        """Whether its drafts may end early, see `engine.drafters.early_stop`."""
        return False

    @property
    def models(self) -> SequenceOf[nn.Module]:
        """The draft models, which have caches of their own."""
        return ()

    @property
    def own_weights(self) -> nn.Module | None:
        """The module that drafts, without what it shares with the target."""
        return None

    @property
    def reduced_rows(self) -> nn.Module | None:
        """The rows that were copied for a reduced vocabulary, if any."""
        return None

    def cost_key(self) -> str:
        """Return what measured costs are kept under; "" where they are not kept."""
        return ""

    def members(self) -> "SequenceOf[DraftSource]":
        """Return the sources of a cascade; itself otherwise."""
        return [self]

    def check(self, target: TargetInfo) -> None:
        """Refuse a target that it does not fit, before anything runs.

        Raises:
            InvalidRequestError: names the two values that do not fit.
        """
        return

    def configured(self, options: DraftOptions) -> "DraftSource":
        """Return the source of one generator, with its options.

        Raises:
            UnsupportedModelError: an option cannot be had with this model.
        """
        return self

    def open(
        self, lane: Lane, sequence: Sequence, draft_cache: list[Any] | None = None
    ) -> Drafter:
        """Return the drafter of one stream.

        Args:
            lane: the target's.
            sequence: the known tokens.
            draft_cache: the caller's caches of the draft model; None: new ones.
        """
        ...


class HeadSource(DraftSource):
    """A head on a target, which reads what that computes.

    Attributes:
        model: the target.
    """

    follows = True
    model: nn.Module

    def check(self, target: TargetInfo) -> None:
        """Refuse another target than its own, and other token ids."""
        if self.model is not target.model:
            raise InvalidRequestError(
                f"The head in {type(self).__name__} was put on another model than the "
                "generator's. Make it with the same model object."
            )
        self.check_ids(target.highest_id)

    def check_ids(self, highest: int) -> None:
        """Refuse a head that cannot be fed token ids 0 to `highest`, or drafts others.

        Raises:
            InvalidRequestError: names both numbers.
        """

    def cost_key(self) -> str:
        """Return the shape of the head."""
        module = self.own_weights
        return "" if module is None else shape_of(module)


def check_embedding(module: Any, name: str, highest: int) -> None:
    """Refuse an embedding that lacks token ids; see `HeadSource.check_ids`.

    Args:
        module: nn.Embedding, as it is or quantized.
        name: whose it is, for the message.
        highest: the largest id that it will be fed.
    """
    rows = module.weight.shape[0]
    if rows <= highest:
        raise InvalidRequestError(
            f"The {name} has {rows} embeddings, and the target's token ids go up to "
            f"{highest}. Choose the head of this target."
        )


def check_drafted(ids: mx.array | None, name: str, highest: int) -> None:
    """Refuse a reduced vocabulary that has ids which the target lacks.

    Args:
        ids: the target's ids of the logits, uint32 [n]; None: all.
        name: whose they are, for the message.
        highest: the target's largest id.
    """
    drafted = 0 if ids is None else int(ids.max())
    if drafted > highest:
        raise InvalidRequestError(
            f"The {name} drafts token ids up to {drafted}, and the target's go up to "
            f"{highest}. Choose the head of this target."
        )


def shape_of(model: nn.Module) -> str:
    """Return a digest of a model's class and of its parameters' names and types."""
    digest = hashlib.sha256(f"{type(model).__module__}\n".encode())
    arrays: Any = tree_flatten(model.parameters())
    for name, array in sorted(arrays, key=itemgetter(0)):
        digest.update(f"{name} {array.shape} {array.dtype}\n".encode())
    return digest.hexdigest()

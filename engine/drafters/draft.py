"""The base of drafts: a draft of a generator opens a drafter for each stream."""

import hashlib
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_speculation.engine.drafters.base import Drafter
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import (
    CommittedStates,
    CompiledForward,
    HiddenStates,
    Lane,
    MtpConvention,
    Sliding,
    States,
)
from mlx_speculation.models.mtp import HeadCache
from mlx_speculation.warn import notice


@dataclass(frozen=True, slots=True, eq=False)
class TargetInfo:
    """The target that something is to draft for."""

    model: nn.Module  # the target
    tokenizer: Any  # its tokenizer
    folder: Path | None  # where it was loaded from; None: it is not known
    highest_id: int  # the largest token id that its text may hold
    # What an MTP head of it was trained with, if somebody has named it
    convention: MtpConvention | None = None
    trust_remote_code: bool = False  # whether code in the folder of a draft may run


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DraftOptions:
    """The options of a generator that its drafters follow."""

    # The kind of sliding caches that draft models get
    sliding: Sliding = "slack"
    vocabulary: SequenceOf[int] | None = None  # the token ids to draft from; None: all
    history: bool = True  # whether earlier requests may change what is proposed
    # Returns the compiled forward of a draft model; None: they run as they are
    compiled: Callable[[nn.Module], CompiledForward] | None = None


@runtime_checkable
class Draft(Protocol):
    """A way to draft for one target: opens a drafter for each stream.

    What is not overridden holds for a drafter without a model.

    Attributes:
        kind: "model", "lookup", "mtp" and so on; what statistics count by.
        follows: whether its drafters read what the target computes.
        on_ranks: whether it can draft for a target that is spread over ranks.
        free: whether it drafts at no cost, and as much as the text offers. Calibration
            measures the rounds of a substitute then.
        reducible: whether it can draft from some token ids only.
        notice: what a generator's `notices` say of how it was loaded; "": nothing.
        foreign: whether it reads the text in tokens of its own.
    """

    kind: str = "drafter"
    follows: bool = False
    on_ranks: bool = True
    free: bool = False
    reducible: bool = False
    notice: str = ""
    foreign: bool = False

    @property
    def reusable(self) -> bool:
        """Return whether several of its drafters may be open at once."""
        return True

    @property
    def trees(self) -> bool:
        """Return whether its drafters can propose trees; an EAGLE-3 head's do."""
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
        module = self.own_weights
        return "" if module is None else shape_of(module)

    @property
    def reads_output(self) -> bool:
        """Return whether its head makes its logits with the target's output layer."""
        return False

    def take_output(self, output: nn.Module) -> None:
        """Read this output layer from now on, where the target's is divided."""
        return

    def resolved(self, resolve: "Callable[[Any], Draft]") -> "Draft":
        """Return it with what it was passed resolved, see `CascadeDraft`."""
        return self

    def members(self) -> "SequenceOf[Draft]":
        """Return the members of a cascade; itself otherwise."""
        return [self]

    def new_cache(self, first: int) -> HeadCache | None:
        """Return caches of its head from a position on; None: it has none.

        A `PrefixCache` keeps their rows for requests that begin alike.
        """
        return None

    def check(self, target: TargetInfo) -> None:
        """Refuse a target that it does not fit, before anything runs.

        Raises:
            InvalidRequestError: names the two values that do not fit.
        """
        return

    def configured(self, options: DraftOptions) -> "Draft":
        """Return the draft of one generator, with its options.

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


def members_of(draft: Draft | None) -> SequenceOf[Draft]:
    """Return the members of a cascade, or the only one, if there is any."""
    return () if draft is None else draft.members()


class FolderDraft(Draft, Protocol):
    """A draft that is loaded from a folder of its own, or out of the target's."""

    @staticmethod
    def fits(config: dict[str, Any]) -> bool:
        """Return whether a folder with this config.json is one; none is by default."""
        return False

    @classmethod
    def load(cls, folder: Path, target: TargetInfo) -> "FolderDraft":
        """Load it; the folder of an MTP head may be the target's.

        Raises:
            ModelFolderError: the folder holds none, or not all of one.
            SpeculationError: it does not fit the target.
        """
        ...


class HeadDraft(FolderDraft):
    """A head on a target, which reads what that computes.

    Attributes:
        model: the target.
        head: without what it shares with the target; None: there is no module.
        taps: show what the head reads.
    """

    follows = True
    on_ranks = False
    model: nn.Module
    head: nn.Module | None = None
    taps: HiddenStates
    # Loads a head, given its folder, the target, and perhaps a `tokenizer`
    from_folder: ClassVar[Callable[..., "HeadDraft"]]

    def say(self, said: str) -> None:
        """Warn of layers that config.json does not name, if anything is to be said."""
        self.notice = said
        if said:
            notice(said)

    @property
    def own_weights(self) -> nn.Module | None:
        """The head's own; embedding and output layer of the target are not in it."""
        return self.head

    @classmethod
    def load(cls, folder: Path, target: TargetInfo) -> "HeadDraft":
        """Load a head; see `FolderDraft`."""
        return cls.from_folder(folder, target.model, tokenizer=target.tokenizer)

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
        head: Any = {} if self.head is None else self.head
        if "embed_tokens" in head:
            check_embedding(head.embed_tokens, highest)
        ids = getattr(head, "ids", None)
        drafted = 0 if ids is None else int(ids.max())
        if drafted > highest:
            raise InvalidRequestError(
                f"The head drafts token ids up to {drafted}, and the target's go up to "
                f"{highest}. Choose the head of this target."
            )

    def following(
        self, lane: Lane, select: Callable[[States], mx.array]
    ) -> CommittedStates:
        """Return the states that a target's lane commits from now on, selected so."""
        committed = CommittedStates(self.taps, select)
        lane.follower = committed
        return committed


def check_embedding(module: Any, highest: int) -> None:
    """Refuse an embedding that lacks token ids; see `HeadDraft.check_ids`."""
    rows = module.weight.shape[0]
    if rows <= highest:
        raise InvalidRequestError(
            f"The head has {rows} embeddings, and the target's token ids go up to "
            f"{highest}. Choose the head of this target."
        )


def shape_of(model: nn.Module) -> str:
    """Return a digest of a model's class and of its parameters' names and types."""
    digest = hashlib.sha256(f"{type(model).__module__}\n".encode())
    arrays: Any = tree_flatten(model.parameters())
    for name, array in sorted(arrays, key=itemgetter(0)):
        digest.update(f"{name} {array.shape} {array.dtype}\n".encode())
    return digest.hexdigest()

"""The base class of a generator's draft, which opens a drafter for each stream."""

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
    """The target of a draft."""

    model: nn.Module  # the target
    tokenizer: Any  # its tokenizer
    folder: Path | None  # where it was loaded from; None: not known
    highest_id: int  # the largest token id that its text may contain
    # The MTP head's convention, if the user or speculation.json names one; else None
    convention: MtpConvention | None = None
    trust_remote_code: bool = False  # whether to run code in the draft's folder


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DraftOptions:
    """The options of a generator that concern its drafters."""

    # The kind of sliding caches that draft models get
    sliding: Sliding = "slack"
    vocabulary: SequenceOf[int] | None = None  # the token ids to draft from; None: all
    history: bool = True  # whether proposals may depend on earlier requests
    # Returns the compiled forward of a draft model; None: draft models run uncompiled
    compiled: Callable[[nn.Module], CompiledForward] | None = None


@runtime_checkable
class Draft(Protocol):
    """A way to draft for one target: opens a drafter for each stream.

    The defaults fit a draft without a model.

    Attributes:
        kind: "model", "lookup", "mtp" and so on; the statistics count by kind.
        follows: whether its drafters read the target's hidden states or caches.
        on_ranks: whether it can draft for a target that is sharded over ranks.
        free: whether drafting costs nothing, as in a lookup. Calibration then measures
            rounds of a `ConstantDraft` in its place.
        reducible: whether it can draft from a reduced vocabulary.
        notice: a text on how it was loaded, for the generator's `notices`; "": none.
        foreign: whether it has another tokenizer than the target.
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
        """Return whether several drafters of this draft may be open at once."""
        return True

    @property
    def trees(self) -> bool:
        """Return whether the drafters can propose trees, as with an EAGLE-3 head."""
        return False

    @property
    def models(self) -> SequenceOf[nn.Module]:
        """The draft models, each of which has its own caches."""
        return ()

    @property
    def own_weights(self) -> nn.Module | None:
        """The module that drafts, without weights of the target; None: no module."""
        return None

    @property
    def reduced_rows(self) -> nn.Module | None:
        """The output layer's copied rows for a reduced vocabulary; None: no copy."""
        return None

    def cost_key(self) -> str:
        """Return the key under which costs are stored; "": costs are not stored."""
        module = self.own_weights
        return "" if module is None else shape_of(module)

    @property
    def reads_output(self) -> bool:
        """Return whether a head makes its logits with the target's output layer."""
        return False

    def take_output(self, output: nn.Module) -> None:
        """Use this output layer, since the target's is sharded over ranks."""
        return

    def resolved(self, resolve: "Callable[[Any], Draft]") -> "Draft":
        """Return the draft with its members resolved; see `CascadeDraft`."""
        return self

    def members(self) -> "SequenceOf[Draft]":
        """Return the members of a cascade; of any other draft, the draft itself."""
        return [self]

    def new_cache(self, first: int) -> HeadCache | None:
        """Return new caches of the head for positions from `first` on; None: no head.

        A `PrefixCache` keeps rows of these caches for requests that begin with the same
        tokens.
        """
        return None

    def check(self, target: TargetInfo) -> None:
        """Refuse a target that the draft does not fit, before anything runs.

        Raises:
            InvalidRequestError: the draft does not fit.
        """
        return

    def configured(self, options: DraftOptions) -> "Draft":
        """Return the draft of one generator, with its options.

        Raises:
            UnsupportedModelError: the draft model does not support one of the options.
        """
        return self

    def open(
        self, lane: Lane, sequence: Sequence, draft_cache: list[Any] | None = None
    ) -> Drafter:
        """Return the drafter of one stream.

        Args:
            lane: the target's lane.
            sequence: the known tokens.
            draft_cache: the caller's caches of the draft model; None: new ones.
        """
        ...


def members_of(draft: Draft | None) -> SequenceOf[Draft]:
    """Return the members of a draft, see `Draft.members`; of None, no members."""
    return () if draft is None else draft.members()


class FolderDraft(Draft, Protocol):
    """A draft that is loaded from its own folder, or from the target's."""

    @staticmethod
    def fits(config: dict[str, Any]) -> bool:
        """Return whether a folder with this config.json holds a draft of this class."""
        return False

    @classmethod
    def load(cls, folder: Path, target: TargetInfo) -> "FolderDraft":
        """Load the draft; the folder of an MTP head may be the target's.

        Raises:
            ModelFolderError: the folder holds no such draft, or only a part of one.
            SpeculationError: the draft does not fit the target.
        """
        ...


class HeadDraft(FolderDraft):
    """A head on a target: it reads the target's hidden states.

    Attributes:
        model: the target.
        head: the head's module, without weights of the target; None: no module.
        taps: access to the hidden states that the head reads.
    """

    follows = True
    on_ranks = False
    model: nn.Module
    head: nn.Module | None = None
    taps: HiddenStates
    # Loads a head from a folder for a target, with an optional `tokenizer`
    from_folder: ClassVar[Callable[..., "HeadDraft"]]

    def say(self, said: str) -> None:
        """Store a notice on how the head was loaded, and show it; "": no notice."""
        self.notice = said
        if said:
            notice(said)

    @property
    def own_weights(self) -> nn.Module | None:
        """The head, without the embedding and the output layer of the target."""
        return self.head

    @classmethod
    def load(cls, folder: Path, target: TargetInfo) -> "HeadDraft":
        """Load a head; see `FolderDraft`."""
        return cls.from_folder(folder, target.model, tokenizer=target.tokenizer)

    def check(self, target: TargetInfo) -> None:
        """Refuse a target other than the head's, and token ids that do not fit."""
        if self.model is not target.model:
            raise InvalidRequestError(
                f"The head in {type(self).__name__} was made with another model object "
                "than the generator's. Make it with the generator's model."
            )
        self.check_ids(target.highest_id)

    def check_ids(self, highest: int) -> None:
        """Refuse a head that cannot read ids up to `highest`, or drafts higher ids.

        Raises:
            InvalidRequestError: the ids do not fit.
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
        """Collect what `select` takes from the states that a lane will commit."""
        committed = CommittedStates(self.taps, select)
        lane.follower = committed
        return committed


def check_embedding(module: Any, highest: int) -> None:
    """Refuse an embedding without a row for `highest`; see `HeadDraft.check_ids`."""
    rows = module.weight.shape[0]
    if rows <= highest:
        raise InvalidRequestError(
            f"The head has {rows} embeddings, and the target's token ids go up to "
            f"{highest}. Choose the head of this target."
        )


def shape_of(model: nn.Module) -> str:
    """Return a digest of a model's Python module, parameter names, shapes, dtypes."""
    digest = hashlib.sha256(f"{type(model).__module__}\n".encode())
    arrays: Any = tree_flatten(model.parameters())
    for name, array in sorted(arrays, key=itemgetter(0)):
        digest.update(f"{name} {array.shape} {array.dtype}\n".encode())
    return digest.hexdigest()

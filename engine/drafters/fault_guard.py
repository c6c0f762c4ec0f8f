"""Disables a drafter that raises; generation continues.

What a drafter does decides the speed and never the text, so a text goes on without a
drafter that fails. At its first fault it is disabled for the rest of the stream: what
it holds is not known any more, and a fault in every round would cost a draft in every
round. The next stream begins with it again.

    a fault                                       known
    begin, propose, settle or discard raises      at once
    too many tokens, or no draft at all           at once
    ids that the target lacks, NaN in its logits  with the round's one read; until then
                                                  they are harmless tokens

What the request's own logits processors and constraint raise inside of `choose` is no
fault of the drafter's and is raised, and so are Ctrl-C and MemoryError.
"""

import traceback
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

import mlx.core as mx

from mlx_speculation.engine.drafters.base import (
    NOTHING,
    CheckedChoose,
    CheckedProposal,
    Choose,
    Drafter,
    Proposal,
    ReadsAhead,
    head_of,
    lanes_of,
    remember,
)
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.engine.stats import DrafterFault
from mlx_speculation.interrupts import raised_by_signal
from mlx_speculation.models import Lane

NoteFault = Callable[[DrafterFault], None]


class FaultGuard:
    """A drafter of one stream, asked until its first fault."""

    def __init__(
        self,
        inner: Drafter,
        note: NoteFault,  # gets its fault
        # The lane whose follower the drafter is, if it is one: it is let go of with the
        # drafter
        target: Lane | None = None,
    ) -> None:
        self.inner = inner
        self._note = note
        self._target = target
        self._checked: CheckedProposal | None = None
        self._disabled = False
        if target is not None and target.follower is not None:
            target.follower.call_through(self._after_chunk)

    @property
    def disabled(self) -> bool:
        """Whether the drafter has failed, and is not asked any more."""
        return self._disabled

    @property
    def lanes(self) -> list[Lane | None]:
        """The lanes of its draft model, see `lanes_of`."""
        return [None if self._disabled else lane for lane in lanes_of(self.inner)]

    @property
    def prefix_head(self) -> Any:
        """The head whose rows a `PrefixCache` keeps; None: there is none."""
        return None if self._disabled else head_of(self.inner)

    @property
    def held(self) -> SequenceOf[Any]:
        """The arrays and caches that it holds, for a count of bytes."""
        return list(getattr(self.inner, "held", ()))

    @property
    def batch_lane(self) -> Lane | None:
        """Its lane, if rows of a batch can share it; see `ModelDrafter`."""
        return getattr(self.inner, "batch_lane", None)

    @property
    def batch_head(self) -> Any:
        """Its head, if rows of a batch can share it; see `MtpDrafter`."""
        return getattr(self.inner, "batch_head", None)

    def let_go(self) -> None:
        """Let go of what a head holds, see `MtpDrafter`."""
        getattr(self.inner, "let_go", lambda: None)()

    def remember(self, tokens: SequenceOf[int]) -> None:
        """Let it keep the tokens of the finished stream, if it is a lookup."""
        try:
            remember(self.inner, tokens)
        except Exception as error:
            self.fail("remember", error)

    def read_ahead(self, sequence: Sequence, fits: Callable[[int], bool]) -> bool:
        """Let it read ahead, if it can."""
        inner = self.inner
        if isinstance(inner, ReadsAhead) and not self._disabled:
            try:
                return inner.read_ahead(sequence, fits)
            except Exception as error:
                self._fail("begin", error)
        return True

    def begin(self, sequence: Sequence) -> None:
        """Let it begin."""
        self._run("begin", lambda: self.inner.begin(sequence))

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        """Return its draft, checked and submitted; nothing where it has failed.

        `choose` is asked for one draft only.
        """
        assert isinstance(choose, CheckedChoose)
        self._checked = None
        if self._disabled:
            return NOTHING
        try:
            draft = self.inner.propose(sequence, limit, choose)
            checked = choose.checked(draft, limit)
            if choose.raised is None:
                self._checked = checked
                if checked.draft.length:  # runs while the target's graph is built
                    mx.async_eval(*checked.arrays)
                return checked.draft
        except Exception as error:
            if choose.raised is None:
                self._fail("propose", error)
                return NOTHING
        # Of the request's own, whatever the drafter made of it.
        assert choose.raised is not None
        raise choose.raised

    def settle(self, accepted: int) -> None:
        """Let it settle, unless the round has shown that its draft was none.

        Legal when the round's result has been read: what is read here came with it.
        """
        checked, self._checked = self._checked, None
        rows, ids = (0, 0) if checked is None else checked.faults()
        if rows or ids:
            self._fail("propose", what_is_wrong(rows, ids))
        if not self._disabled:
            try:
                self.inner.settle(accepted)
            except Exception as error:
                self._fail("settle", error)

    def discard(self) -> None:
        """Let it undo the round."""
        self._checked = None
        self._run("discard", self.inner.discard)

    def fail(self, call: str, error: Exception) -> None:
        """Disable the drafter for a fault that was met elsewhere."""
        if not self._disabled:
            self._fail(call, error)

    def _after_chunk(self, method: Callable[[], None]) -> None:
        """Let it read the states of a chunk of the prompt."""
        self._run("begin", method)

    def _run(self, call: str, act: Callable[[], None]) -> None:
        if self._disabled:
            return
        try:
            act()
        except Exception as error:
            self._fail(call, error)

    def _fail(self, call: str, error: Exception) -> None:
        """Disable the drafter, and note why; MemoryError is raised."""
        if isinstance(error, MemoryError) or raised_by_signal(error):
            raise error
        self._disabled = True
        if self._target is not None:
            self._target.follower = None  # or states would pile up for nobody
        try:
            self.inner.discard()
        except Exception as second:
            error.add_note(f"Its discard() raised {type(second).__name__}: {second}")
        self._note(
            DrafterFault(
                drafter=type(self.inner).__name__,
                call=call,
                reason=f"{type(error).__name__}: {error}",
                details="".join(traceback.format_exception(error)),
            )
        )


def what_is_wrong(rows: int, ids: int) -> Exception:
    """Return the fault of a draft, by its counts of unusable logits and of ids."""
    if rows:
        return ArithmeticError(
            f"{rows} rows of the drafter's logits hold a NaN or no finite largest "
            "value. Check its weights, or load it in float32."
        )
    return ValueError(
        f"{ids} of the proposed tokens are ids that the target has no row for. Fix "
        "its propose(), or choose a draft with the target's token ids."
    )

"""A constraint on the answer of a model that thinks first.

During the thinking any token but the end of the text is allowed. A mark, which is a
fixed sequence of tokens, ends the thinking and begins the inner constraint. Once the
budget of thinking tokens is spent, only the mark is allowed, to leave the answer room.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mlx_speculation.errors import ConstraintError
from mlx_speculation.samplers.constraints.base import Constraint, ConstraintState


class AfterThinking:
    """Unconstrained thinking, then an inner constraint; see `Constraint`."""

    def __init__(
        self,
        mark: Sequence[int],  # the tokens that end thinking
        ids: int,  # the number of token ids
        *,
        inner: Constraint | None = None,  # of the answer; None: any text is allowed
        budget: int | None = None,  # maximum tokens of thinking; None: no limit
    ) -> None:
        self.mark, self.inner, self.budget = tuple(mark), inner, budget
        self.anything = np.ones(ids, dtype=np.bool_)
        # Ids past the end of a mask are not allowed.
        self.only: dict[int, NDArray[np.bool_]] = {
            token: np.arange(token + 1) == token for token in self.mark
        }

    def begin(self) -> "ThinkingState":
        """Return a state before the first generated token."""
        return ThinkingState(self, 0, (), None)


class ThinkingState:
    """The state of one text: thinking, then an answer."""

    def __init__(
        self,
        whole: AfterThinking,
        count: int,  # tokens of thinking so far
        tail: tuple[int, ...],  # the last tokens, at most as many as the mark has
        answer: ConstraintState | None,  # None: still thinking, or no inner constraint
    ) -> None:
        self._whole, self._count = whole, count
        self._tail, self._answer = tail, answer

    def allowed(self) -> NDArray[np.bool_]:
        """Return which token ids may come next, bool [ids]."""
        if self._answer is not None:
            return self._answer.allowed()
        if self._forced:
            return self._whole.only[self._next]
        return self._whole.anything

    @property
    def may_end(self) -> bool:
        """True if the text may end here."""
        if self._answer is not None:
            return self._answer.may_end
        return self._ended

    def advance(self, token: int) -> None:
        """Append a token to the text; see `ConstraintState`."""
        whole = self._whole
        if self._answer is not None:
            self._answer.advance(token)
            return
        if self._forced and token != self._next:
            raise ConstraintError(
                f"Token {token} is not allowed: the thinking has had its "
                f"{whole.budget} tokens. Take one that allowed() names."
            )
        self._count += 1
        if self._ended:
            return
        self._tail = (*self._tail, token)[-len(whole.mark) :]
        if self._ended and whole.inner is not None:
            self._answer = whole.inner.begin()

    def fork(self) -> "ThinkingState":
        """Return an independent state at the same position of the text."""
        answer = None if self._answer is None else self._answer.fork()
        return ThinkingState(self._whole, self._count, self._tail, answer)

    @property
    def _ended(self) -> bool:
        return self._tail == self._whole.mark

    @property
    def _forced(self) -> bool:
        budget = self._whole.budget
        return budget is not None and self._count >= budget and not self._ended

    @property
    def _next(self) -> int:
        """The mark's next token; the text may already end with a part of the mark."""
        mark, tail = self._whole.mark, self._tail
        ends = range(len(tail) + 1)
        return mark[max(n for n in ends if tail[len(tail) - n :] == mark[:n])]

"""A constraint on the answer of a model that thinks first.

During the thinking any token but the end of the text is allowed. A fixed sequence of
tokens, the mark, ends it. Once the budget is spent, only the mark is allowed.
"""

from collections.abc import Sequence
from copy import copy

import numpy as np
from numpy.typing import NDArray

from mlx_speculation.errors import ConstraintError
from mlx_speculation.samplers.constraints.base import Constraint, ConstraintState


class AfterThinking:
    """A `Constraint` and its state: free thinking, then an inner constraint."""

    def __init__(
        self,
        mark: Sequence[int],  # the tokens that end thinking
        ids: int,  # the number of token ids
        *,
        inner: Constraint | None = None,  # of the answer; None: any text is allowed
        budget: int | None = None,  # maximum tokens of thinking; None: no limit
    ) -> None:
        self._mark, self._inner, self._budget = tuple(mark), inner, budget
        self._anything = np.ones(ids, dtype=np.bool_)
        self._count = 0  # tokens of thinking so far
        self._tail: tuple[int, ...] = ()  # the last of them, at most as many as `mark`
        self._answer: ConstraintState | None = None  # None: any token is allowed

    def begin(self) -> "AfterThinking":
        """Return a state before the first generated token."""
        return self.fork()

    def fork(self) -> "AfterThinking":
        """Return an independent state at the same position of the text."""
        state = copy(self)
        state._answer = None if self._answer is None else self._answer.fork()
        return state

    def allowed(self) -> NDArray[np.bool_]:
        """Return which token ids may come next, bool [ids]."""
        if self._answer is not None:
            return self._answer.allowed()
        if self._forced is not None:
            return np.arange(self._forced + 1) == self._forced
        return self._anything

    @property
    def may_end(self) -> bool:
        """True if the text may end here."""
        if self._answer is not None:
            return self._answer.may_end
        return self._tail == self._mark

    def advance(self, token: int) -> None:
        """Append a token to the text; see `ConstraintState`."""
        if self._answer is not None:
            self._answer.advance(token)
            return
        if self._forced not in (None, token):
            raise ConstraintError(
                f"Token {token} is not allowed: the thinking has had its "
                f"{self._budget} tokens. Take one that allowed() names."
            )
        if self._tail == self._mark:
            return
        self._count += 1
        self._tail = (*self._tail, token)[-len(self._mark) :]
        if self._tail == self._mark and self._inner is not None:
            self._answer = self._inner.begin()

    @property
    def _forced(self) -> int | None:
        """The mark's next token if the budget is spent; None: any token is allowed."""
        mark, tail = self._mark, self._tail
        if self._budget is None or self._count < self._budget or tail == mark:
            return None
        # The text may already end with a part of the mark.
        ends = range(len(tail) + 1)
        return mark[max(n for n in ends if tail[len(tail) - n :] == mark[:n])]

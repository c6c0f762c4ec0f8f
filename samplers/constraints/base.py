"""Constraints: the token ids that may come next, by state.

A grammar, a JSON schema or a list of allowed tokens is a `Constraint`. Its state
stands somewhere in one text. It is forked for every draft position, and forks of
rejected drafts are forgotten, so nothing needs to be undone; `progress` does that.
This module is for those who write constraints. It knows token ids and arrays of the
host, and no text.
"""

from collections.abc import Collection, Mapping
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from mlx_speculation.errors import ConstraintError, InvalidRequestError


@runtime_checkable
class ConstraintState(Protocol):
    """A place in one text, and what may come next there."""

    def allowed(self) -> NDArray[np.bool_]:
        """Return which token ids may come next, bool [ids].

        Ids past the end of the array may not. What it says of end-of-text ids does not
        count: `may_end` does. Changes nothing.

        Raises:
            ConstraintError: it is not known, for example because a limit was hit.
        """
        ...

    @property
    def may_end(self) -> bool:
        """Return whether the text may end here. Changes nothing."""
        ...

    def advance(self, token: int) -> None:
        """Go on by one token. Never called with an end-of-text id.

        Raises:
            ConstraintError: the token is not allowed; the state stays as it was.
        """
        ...

    def fork(self) -> "ConstraintState":
        """Return a state at the same place. Neither is changed by the other's steps.

        Called once for each draft position, so it has to be cheap.
        """
        ...


@runtime_checkable
class Constraint(Protocol):
    """Constraint on generated text. Serves any number of generations."""

    def begin(self) -> ConstraintState:
        """Return a state before the first generated token."""
        ...


class TokenAutomaton:
    """A finite automaton over token ids.

    Two tokens 5, then any number of 6 or 7:

        TokenAutomaton({0: {5: 1}, 1: {5: 2}, 2: {6: 2, 7: 2}}, accepting={2})

    Args:
        transitions: the next state for each state and token id. A state that is not
            there has no next one.
        accepting: the states in which the text may end.
        start: the state before the first token.

    Raises:
        InvalidRequestError: a token id is negative.
    """

    def __init__(
        self,
        transitions: Mapping[int, Mapping[int, int]],
        *,
        accepting: Collection[int],
        start: int = 0,
    ) -> None:
        self._next = {place: dict(steps) for place, steps in transitions.items()}
        self._accepting = frozenset(accepting)
        self._start = start
        lowest = min(
            (min(steps, default=0) for steps in self._next.values()), default=0
        )
        if lowest < 0:
            raise InvalidRequestError(
                f"There is a token id {lowest}, and ids are 0 or more. Fix the "
                "transitions."
            )

    def begin(self) -> "AutomatonState":
        """Return a state before the first generated token."""
        return AutomatonState(self._next, self._accepting, self._start)


def allowed_tokens(ids: Collection[int]) -> TokenAutomaton:
    """Return the constraint that allows these ids and no others, at any length."""
    return TokenAutomaton({0: dict.fromkeys(ids, 0)}, accepting={0})


class AutomatonState:
    """A state of a `TokenAutomaton`; see `ConstraintState`."""

    def __init__(
        self,
        transitions: Mapping[int, Mapping[int, int]],
        accepting: frozenset[int],
        place: int,
    ) -> None:
        self._next, self._accepting, self._place = transitions, accepting, place

    def allowed(self) -> NDArray[np.bool_]:
        """Return which token ids have a next state, bool [largest such id + 1]."""
        ids = list(self._next.get(self._place, ()))
        mask = np.zeros(max(ids, default=-1) + 1, dtype=np.bool_)
        mask[ids] = True
        return mask

    @property
    def may_end(self) -> bool:
        """Return whether the text may end here."""
        return self._place in self._accepting

    def advance(self, token: int) -> None:
        """Go on by one token; see `ConstraintState`."""
        steps = self._next.get(self._place, {})
        if token not in steps:
            raise ConstraintError(
                f"Token {token} is not allowed in state {self._place}, which allows "
                f"{len(steps)} others. Take one that allowed() names."
            )
        self._place = steps[token]

    def fork(self) -> "AutomatonState":
        """Return a state at the same place."""
        return AutomatonState(self._next, self._accepting, self._place)

"""Constraints: which token ids may come next in a text.

This is the interface for authors of constraints, such as a grammar, a JSON schema or a
list of allowed tokens. A round forks the state for every draft position, and drops the
forks of rejected tokens, so a state is never rolled back.
"""

from collections.abc import Collection, Mapping
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from mlx_speculation.errors import ConstraintError, InvalidRequestError


@runtime_checkable
class ConstraintState(Protocol):
    """A place in one text, with the tokens that may come next."""

    def allowed(self) -> NDArray[np.bool_]:
        """Return which token ids may come next, bool [ids]. Does not change the state.

        Ids past the end of the array are not allowed. The values of end-of-text ids are
        ignored, since `may_end` decides on them.

        Raises:
            ConstraintError: the mask cannot be computed, for example because a limit
                was hit.
        """
        ...

    @property
    def may_end(self) -> bool:
        """Return whether the text may end here. Does not change the state."""
        ...

    def advance(self, token: int) -> None:
        """Append a token to the text. Never called with an end-of-text id.

        Raises:
            ConstraintError: the token is not allowed; the state stays as it was.
        """
        ...

    def fork(self) -> "ConstraintState":
        """Return an independent state at the same place; has to be fast."""
        ...


@runtime_checkable
class Constraint(Protocol):
    """A constraint on generated text, for any number of generations."""

    def begin(self) -> ConstraintState:
        """Return a state before the first generated token."""
        ...


class TokenAutomaton:
    """A finite automaton over token ids.

    Example: two tokens 5, then any number of tokens 6 or 7:

        TokenAutomaton({0: {5: 1}, 1: {5: 2}, 2: {6: 2, 7: 2}}, accepting={2})

    Args:
        transitions: for each state and token id, the next state. A state that is
            missing here has no next state.
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
                f"The transitions have the token id {lowest}, but ids are 0 or more. "
                "Correct the transitions."
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
        """Append a token to the text."""
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

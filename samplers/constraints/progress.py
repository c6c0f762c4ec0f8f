"""One generation under a constraint: masks for rows of logits, and commits.

A path is a list of token ids that follow the committed text. It leads to a place in the
text. A path's place is computed once in a round, for the draft, the target's rows and
the commit.

    committed text ends in place s, drafted d_1 d_2 d_3, d_3 not allowed after d_2
    row 0   allowed in s                     row 2   allowed after d_1 d_2
    row 1   allowed after d_1                row 3   any id: d_3 is never accepted

At places where the text may end, end-of-text ids are allowed. If no token may follow
there, the text is complete: it ends with its last token, without an end-of-text id.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_speculation.errors import ConstraintError
from mlx_speculation.samplers.constraints.base import Constraint, ConstraintState


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the text."""

    state: ConstraintState  # the state at this place; it is forked, never advanced
    # The ids that may come next, bool [ids], end-of-text ids included.
    mask: NDArray[np.bool_]
    may_end: bool = False  # whether the text may end here
    goes_on: bool = False  # whether an id that is no end-of-text id may come next
    # The error of the constraint at this place; no id is allowed then.
    failure: ConstraintError | None = None

    @property
    def forced(self) -> int | None:
        """The only id that may come next; None: several, none, or end-of-text only."""
        if not self.goes_on or np.count_nonzero(self.mask) != 1:
            return None
        return int(self.mask.argmax())


@dataclass(frozen=True, slots=True)
class Followed:
    """The number of a round's emitted tokens that the constraint lets stay."""

    keep: int  # how many tokens stay
    complete: bool  # whether the text is complete after the last of them


class Constrained:
    """The text of one generation under its constraint."""

    def __init__(
        self,
        constraint: Constraint,
        *,
        usable: NDArray[np.bool_],  # the ids that can be chosen at all, bool [ids]
        ends: Collection[int],  # end-of-text ids, which the constraint never sees
    ) -> None:
        self._usable = usable
        self._ends = frozenset(ends)
        self._end_ids = [token for token in self._ends if 0 <= token < len(usable)]
        self._count = 0
        self._ended = False
        self._committed = self._look(constraint.begin())
        self._places: dict[tuple[int, ...], Place | None] = {(): self._committed}

    @property
    def goes_on(self) -> bool:
        """Return whether another token may follow the committed text."""
        return self._committed.goes_on and not self._ended

    @property
    def complete(self) -> bool:
        """Return whether the committed text can only end."""
        return self._committed.may_end and not self._committed.goes_on

    def check(self) -> None:
        """Refuse a committed text that can neither go on nor end.

        Raises:
            ConstraintError: the text is stuck, or the constraint failed at its end.
        """
        if self._committed.failure is not None:
            raise self._committed.failure
        if not (self._committed.goes_on or self._committed.may_end):
            raise ConstraintError(
                f"After {self._count} constrained tokens, the constraint allows none "
                f"of the {int(self._usable.sum())} ids that can be chosen, and the "
                "text may not end there. Loosen the constraint, or use a tokenizer "
                "that can write what it requires."
            )

    def place(self, path: Sequence[int]) -> Place | None:
        """Return the place after these tokens; None: one is barred or end-of-text."""
        key = tuple(path)
        if key not in self._places:
            self._places[key] = self._step(self.place(key[:-1]), key[-1])
        return self._places[key]

    def forced(self, ahead: Sequence[int], limit: int) -> list[int]:
        """Return the tokens, at most `limit`, that have to follow `ahead`.

        Each is the only token that its mask allows. For a fixed piece of text, masks of
        llguidance allow one tokenization only, that of its `compute_ff_tokens`.
        """
        path = list(ahead)
        while len(path) < len(ahead) + limit:
            place = self.place(path)
            token = None if place is None else place.forced
            if token is None:
                break
            path.append(token)
        return path[len(ahead) :]

    def masks(self, ahead: Sequence[int], count: int) -> mx.array:
        """Return the masks of the rows after the `count` longest prefixes of `ahead`.

        The result is bool [count, ids]. `ahead` are token ids after the committed text;
        `count` is at most `len(ahead) + 1`.
        """
        masks = np.ones((count, len(self._usable)), dtype=np.bool_)
        shortest = len(ahead) + 1 - count
        for row, length in enumerate(range(shortest, len(ahead) + 1)):
            place = self.place(ahead[:length])
            # A row without a place, or with an empty mask, allows every id. Its token
            # is never emitted: it comes after a token that is not allowed, or after the
            # place where `follow` cuts the text.
            if place is not None and place.mask.any():
                masks[row] = place.mask
        return mx.array(masks)

    def follow(self, emitted: Sequence[int]) -> Followed:
        """Return how many of a round's tokens stay; the committed text does not change.

        The tokens are cut after the first one that no token may follow.

        Raises:
            ConstraintError: a token is not allowed.
        """
        for index, token in enumerate(emitted):
            if token in self._ends:
                return Followed(index + 1, complete=False)
            place = self._known(emitted[: index + 1])
            if not place.goes_on:
                return Followed(index + 1, complete=place.may_end)
        return Followed(len(emitted), complete=False)

    def commit(self, emitted: Sequence[int]) -> None:
        """Append tokens to the committed text; the last can be an end-of-text id.

        Raises:
            ConstraintError: a token is not allowed; the text does not change.
        """
        ended = bool(emitted) and emitted[-1] in self._ends
        text = emitted[:-1] if ended else emitted
        self._committed = self._known(text)
        self._ended = ended
        self._places = {(): self._committed}
        self._count += len(text)

    def _known(self, path: Sequence[int]) -> Place:
        place = self.place(path)
        if place is None:
            raise ConstraintError(
                f"After {self._count} constrained tokens, the constraint does not "
                f"allow the chosen tokens {list(path)}. Choose from the masks."
            )
        return place

    def _step(self, place: Place | None, token: int) -> Place | None:
        if place is None or token in self._ends:
            return None
        if not 0 <= token < len(place.mask) or not place.mask[token]:
            return None
        state = place.state.fork()
        try:
            state.advance(token)
            return self._look(state)
        except ConstraintError as error:  # `check` raises it once this is committed
            return Place(state, np.zeros_like(self._usable), failure=error)

    def _look(self, state: ConstraintState) -> Place:
        """Return the place of a state; its mask has usable ids only."""
        mask = np.zeros_like(self._usable)
        allowed = _checked(state.allowed())[: len(mask)]
        mask[: len(allowed)] = allowed
        mask &= self._usable
        mask[self._end_ids] = False
        goes_on, may_end = bool(mask.any()), state.may_end
        if may_end:
            mask[self._end_ids] = self._usable[self._end_ids]
        return Place(state, mask, may_end, goes_on)


def _checked(allowed: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Refuse a mask that is not bool [ids], such as a list of ids or packed bits."""
    if allowed.dtype != np.bool_ or allowed.ndim != 1:
        raise ConstraintError(
            f"allowed() returned {allowed.dtype}{list(allowed.shape)}, but has to "
            "return bool [ids], one value for each token id. Fix the constraint."
        )
    return allowed

"""The drafter that asks several drafters in turn."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlx_speculation.engine.draft_length.early_stop import Stop
from mlx_speculation.engine.drafters.base import (
    NOTHING,
    Choices,
    Choose,
    Draft,
    Drafter,
    ReadsAhead,
)
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.errors import InvalidRequestError


@dataclass(slots=True)
class Turns:
    """How many tokens each drafter of a cascade may draft, and whose draft was taken.

    Attributes:
        lengths: of the next round; None: all as many as the round.
        stops: where each of them ends its draft early, see
        `engine.draft_length.early_stop`.
        answered: the drafter that proposed the last draft; None: none did.
    """

    lengths: tuple[int, ...] | None = None
    stops: tuple[Stop | None, ...] = ()
    answered: int | None = None

    def limit(self, drafter: int, limit: int) -> int:
        """Return how many tokens a drafter may propose of a round's.

        A round behind a plain step drafts one token more than was planned, which
        stands for that step's.
        """
        if self.lengths is None:
            return limit
        own, more = self.lengths[drafter], max(0, limit - max(self.lengths))
        return min(limit, own + more) if own else 0


class Cascade:
    """Takes the draft of the first drafter that proposes anything.

        draft = Cascade(LookupDrafter(minimum_match=8), small_model)
        generator = SpeculativeGenerator(model, tokenizer, draft=draft)

    A model that was passed over lags behind, and is fed what it has missed when its
    turn comes.

    Lengths by measurement are each drafter's own, see `engine.draft_length.cascade`.

    Args:
        drafters: at least two; mlx-lm models with the target's token ids and drafters.

    Attributes:
        turns: what the lengths of a stream say; set by who makes the stream.
    """

    def __init__(self, *drafters: Any) -> None:
        if len(drafters) < 2:
            raise InvalidRequestError(
                f"A cascade of {len(drafters)} drafters was asked for, and at least 2 "
                "are needed. Pass the drafter itself."
            )
        self._drafters = drafters
        self._asked: Drafter | None = None
        self.turns = Turns()

    @property
    def drafters(self) -> tuple[Any, ...]:
        """The drafters, in the order in which they are asked."""
        return self._drafters

    def read_ahead(self, sequence: Sequence, fits: Callable[[int], bool]) -> bool:
        """Let every drafter read ahead that can."""
        drafters = [each for each in self._drafters if isinstance(each, ReadsAhead)]
        return all(each.read_ahead(sequence, fits) for each in drafters)

    def begin(self, sequence: Sequence) -> None:
        """Let every drafter begin."""
        self._asked = None
        for drafter in self._drafters:
            drafter.begin(sequence)

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Draft:
        """Return the first draft that is not empty."""
        draft = NOTHING  # stays so where none is asked any more
        self._asked = self.turns.answered = None
        for index, drafter in enumerate(self._drafters):
            own = self.turns.limit(index, limit)
            if own <= 0:
                continue
            self._asked = drafter
            if self.turns.stops and isinstance(choose, Choices):
                choose = choose.ending(self.turns.stops[index])
            found = drafter.propose(sequence, own, choose)
            draft = draft if found is NOTHING else found
            if found.length:
                self.turns.answered = index
                break
            drafter.discard()
        return draft

    def settle(self, accepted: int) -> None:
        """Let the drafter settle whose draft it was."""
        assert self._asked is not None
        self._asked.settle(accepted)

    def discard(self) -> None:
        """Let the drafter discard that was asked last; the others have done nothing."""
        if self._asked is not None:
            self._asked.discard()

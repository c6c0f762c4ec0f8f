"""Probe of a drafter's training convention: scores of candidates, and the choice.

The target writes a short text, and the drafter guesses it with each candidate for the
convention. At each place of the text, with p the target's distribution and q the
drafter's, the score is

    value      sum over x of p(x) log q(x)

This is the expected log-probability that the drafter gives to the target's token. The
log-probability of the written token would not do: that token is always the most
probable one, so overconfident candidates would win (Gneiting and Raftery 2007, section
3, on proper scores). Two shares show whether a candidate is right at all:

    agreement  the share of places where p and q have the same most probable token
    chance     the share expected by chance, from how often each token is the most
               probable one of p and of q (Cohen 1960, equation 1)
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_speculation.errors import ConventionError

# By published measurements, heads that read the wrong token agree in at most 0.11 of
# the places, and heads that read the right token in at least 0.48.
LEAST_AGREEMENT = 0.15
# A score with fewer places is never taken to be above chance.
FEWEST_PLACES = 16
# A candidate replaces the usual one if its mean is better by more than `CERTAINTY`
# standard errors, and by more than `LEAST_GAIN` nats.
CERTAINTY = 2.0
LEAST_GAIN = 0.01
_FLOOR = -50.0

Candidate = TypeVar("Candidate", bound=Hashable)


@dataclass(frozen=True, slots=True, eq=False)
class Score:
    """Score of a candidate on a text."""

    values: NDArray[np.float64]  # float64 [places], expected log-probabilities in nats
    agreement: float
    chance: float

    @classmethod
    def of(
        cls, logits: mx.array, target_log_probs: mx.array, tokens: mx.array
    ) -> "Score":
        """Score a candidate.

        `logits` are the candidate's, [places, vocab]. `target_log_probs` are float32
        [places, vocab]. `tokens` are the target's choices, ids [places].
        """
        drafted = log_probs(logits)
        drafted = mx.where(mx.isnan(drafted), _FLOOR, mx.maximum(drafted, _FLOOR))
        values = (mx.exp(target_log_probs) * drafted).sum(axis=-1)
        guessed = mx.argmax(drafted, axis=-1)
        mx.eval(values, guessed)
        result, right = np.array(guessed), np.array(tokens)
        length, width = max(1, len(result)), logits.shape[-1]
        often = [np.bincount(each, minlength=width) for each in (result, right)]
        return cls(
            np.array(values, dtype=np.float64),
            float((result == right).sum() / length),
            float(np.dot(*often) / length**2),
        )

    @property
    def mean(self) -> float:
        """The mean of the values."""
        return float(self.values.mean()) if self.values.size else _FLOOR

    @property
    def above_chance(self) -> bool:
        """Return whether the agreement is too large for chance or a wrong convention.

        Cohen's kappa, which corrects for chance, has to be at least `LEAST_AGREEMENT`.
        """
        if self.values.size < FEWEST_PLACES or self.chance == 1:
            return False
        return self.agreement - self.chance >= LEAST_AGREEMENT * (1 - self.chance)

    def surely_above(
        self, other: "Score", *, certainty: float = CERTAINTY, gain: float = LEAST_GAIN
    ) -> bool:
        """Return whether this score is significantly better than another.

        Both are scores at the same places. `certainty` is the least gain in standard
        errors, and `gain` is the least gain in nats.
        """
        gains = self.values - other.values
        error = gains.std() / max(1.0, np.sqrt(gains.size))
        return bool(gains.mean() > max(certainty * error, gain))

    def __str__(self) -> str:
        return (
            f"agrees {self.agreement:.0%} (chance {self.chance:.0%}), "
            f"log-probability {self.mean:.2f}"
        )


def log_probs(logits: mx.array) -> mx.array:
    """Return the log-probabilities, float32, for logits of any shape."""
    wide = logits.astype(mx.float32)
    return wide - mx.logsumexp(wide, axis=-1, keepdims=True)


class Trials(Generic[Candidate]):
    """The scores of candidates; each candidate is measured once.

    `measure` scores all candidates at the same places of the same text.
    """

    def __init__(self, measure: Callable[[Candidate], Score]) -> None:
        self._measure = measure
        self.scores: dict[Candidate, Score] = {}

    def score(self, candidate: Candidate) -> Score:
        """Return the score of a candidate."""
        if candidate not in self.scores:
            self.scores[candidate] = self._measure(candidate)
        return self.scores[candidate]

    def best(
        self,
        usual: Candidate,
        others: Iterable[Candidate],
        *,
        certainty: float = CERTAINTY,
        gain: float = LEAST_GAIN,
    ) -> Candidate:
        """Return the best of the others if `surely_above` the usual, else the usual."""
        ranked = sorted(others, key=lambda each: self.score(each).mean)
        if not ranked:
            return usual
        best, known = self.score(ranked[-1]), self.score(usual)
        above = best.surely_above(known, certainty=certainty, gain=gain)
        return ranked[-1] if above else usual


def ranked(
    measure: Callable[[Candidate], Score],
    usual: Candidate,  # is chosen, unless another is significantly better
    others: Iterable[Candidate],
    advice: str,  # the end of the error's message
    shown: Callable[[Candidate], str] = repr,  # a candidate's name in the message
) -> dict[Candidate, Score]:
    """Return the score of each candidate, the chosen one first.

    Raises:
        ConventionError: the best candidate is not above chance.
    """
    trials = Trials(measure)
    best = trials.best(usual, others)
    scores = {best: trials.score(best), **trials.scores}
    if not scores[best].above_chance:
        said = "; ".join(f"{shown(each)} {score}" for each, score in scores.items())
        raise ConventionError(
            "The draft was tried with each possible convention, and with none does it "
            "predict the target's text clearly better than by chance: "
            f"{said}. Choose the draft that belongs to this model, or {advice}."
        )
    return scores

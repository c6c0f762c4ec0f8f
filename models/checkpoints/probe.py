"""Probe of a drafter's training convention: scores of candidates, and the verdict.

A convention that no tensor shows is told by trying. The target writes some text of its
own; each candidate guesses it, and is scored by

    value      sum over x of p(x) log q(x)   at each place of the text

with p the target's distribution there and q the candidate's: the log-probability that
the candidate gives to the target's token, averaged over what that might have been. The
log-probability of the one token that was written would not do: it is the most probable
one, and would favour whatever is too sure of itself (Gneiting and Raftery 2007, section
3: a score is proper if the truth is its best guess).

    agreement  how often the most probable token of q is that of p
    chance     how often it would be by chance, from how often each guesses what, and
               each token is right (Cohen 1960, equation 1)
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_speculation.errors import ConventionError

# Heads that read the wrong token agree in up to 0.11 of the places, right ones on the
# hardest text in 0.48, as others have measured; see `Score.above_chance`.
LEAST_AGREEMENT = 0.15
# Fewer places say nothing.
FEWEST_PLACES = 16
# A candidate replaces the usual one if it is better by so many standard errors, and by
# so many nats.
CERTAINTY = 2.0
LEAST_GAIN = 0.01
_FLOOR = -50.0

Candidate = TypeVar("Candidate", bound=Hashable)


@dataclass(frozen=True, slots=True, eq=False)
class Score:
    """Score of a candidate on a text."""

    values: NDArray[np.float64]  # float64 [places], expected log-probabilities in nats
    agreement: float  # the share of places where its most probable token is the text's
    chance: float  # the share by chance

    @classmethod
    def of(
        cls, logits: mx.array, target_log_probs: mx.array, tokens: mx.array
    ) -> "Score":
        """Score a candidate.

        Args:
            logits: the candidate's, [places, vocab].
            target_log_probs: the target's log-probabilities, float32 [places, vocab].
            tokens: what the target chose, ids [places].
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
        """Return whether this is more than luck, and more than a wrong convention gets.

        That is a chance-corrected agreement (Cohen's kappa) of `LEAST_AGREEMENT`.
        """
        if self.values.size < FEWEST_PLACES or self.chance == 1:
            return False
        return self.agreement - self.chance >= LEAST_AGREEMENT * (1 - self.chance)

    def surely_above(
        self, other: "Score", *, certainty: float = CERTAINTY, gain: float = LEAST_GAIN
    ) -> bool:
        """Return whether it is better at the same places, and not by accident.

        Args:
            other: the score of another candidate.
            certainty: by how many standard errors.
            gain: by how many nats.
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
    """Return log-probabilities, float32, of logits of any shape."""
    wide = logits.astype(mx.float32)
    return wide - mx.logsumexp(wide, axis=-1, keepdims=True)


def whole_logits(logits: mx.array, ids: mx.array | None, width: int) -> mx.array:
    """Return logits [rows, n, width] of all ids; those not drafted get none.

    Args:
        logits: [rows, n, columns].
        ids: of the columns; None: all, in their order.
        width: how many there are.
    """
    if ids is None:
        return logits
    every = mx.full((*logits.shape[:2], width), -mx.inf, mx.float32)
    every[..., ids] = logits.astype(mx.float32)
    return every


class Trials(Generic[Candidate]):
    """The candidates that were tried, each once.

    Args:
        measure: scores one, at the same places of the same text for all.
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
        certainty: float = CERTAINTY,  # see `Score.surely_above`
        gain: float = LEAST_GAIN,  # likewise
    ) -> Candidate:
        """Return the usual candidate, unless the best of the others surely beats it."""
        ranked = sorted(others, key=lambda each: self.score(each).mean)
        if not ranked:
            return usual
        best, known = self.score(ranked[-1]), self.score(usual)
        above = best.surely_above(known, certainty=certainty, gain=gain)
        return ranked[-1] if above else usual


def ranked(
    measure: Callable[[Candidate], Score],  # see `Trials`
    usual: Candidate,  # it is the best, unless another is surely better
    others: Iterable[Candidate],
    advice: str,  # what the refusal ends with
    shown: Callable[[Candidate], str] = repr,  # what the refusal calls a candidate
) -> dict[Candidate, Score]:
    """Return the score of each candidate, the best first.

    Raises:
        ConventionError: the best one is not above chance.
    """
    trials = Trials(measure)
    best = trials.best(usual, others)
    scores = {best: trials.score(best), **trials.scores}
    if not scores[best].above_chance:
        said = "; ".join(f"{shown(each)} {score}" for each, score in scores.items())
        raise ConventionError(
            "The draft guesses what its target writes no better than by chance, "
            f"whatever it is taken for: {said}. Choose the draft that belongs to this "
            f"model, or {advice}."
        )
    return scores

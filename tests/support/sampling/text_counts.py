"""Counts of the texts of whole generations, and their joint distribution."""

from dataclasses import dataclass
from itertools import product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from mlx_speculation import Sampling, SpeculativeGenerator

NORMAL = 3.719  # a normal variable exceeds it with probability 1e-4


@dataclass(frozen=True)
class Texts:
    """All texts of a fixed number of tokens after a prompt.

    Attributes:
        vocab: number of ids of the target.
        emitted: number of tokens of each text.
        prompt: token ids.
    """

    vocab: int
    emitted: int
    prompt: list[int]

    @property
    def all(self) -> list[tuple[int, ...]]:
        """Every text, in the order of counts and probabilities."""
        return list(product(range(self.vocab), repeat=self.emitted))

    def distribution(
        self, target: nn.Module, *, temperature: float, top_k: int = 0, **_: Any
    ) -> NDArray[np.float64]:
        """Return the probability of every text, from forwards of the target alone."""
        prompts = mx.array([[*self.prompt, *text] for text in self.all])
        logits = target(prompts, cache=make_prompt_cache(target))
        rows = logits[:, len(self.prompt) - 1 : -1].astype(mx.float32)
        scaled = np.array(rows, dtype=np.float64) / temperature
        odds = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
        if top_k:
            floor = np.sort(odds, axis=-1)[..., -top_k, None]
            odds = np.where(odds >= floor, odds, 0)
        probs = odds / odds.sum(axis=-1, keepdims=True)
        each = np.take_along_axis(probs, np.array(self.all)[..., None], axis=-1)
        joint: NDArray[np.float64] = each[..., 0].prod(axis=-1)
        assert abs(joint.sum() - 1) < 1e-9
        return joint

    def count(
        self,
        generator: SpeculativeGenerator,
        options: dict[str, Any],
        samples: int,
        first: int = 0,
    ) -> NDArray[np.int64]:
        """Generate once for each of successive seeds, and count the texts."""
        places = {text: place for place, text in enumerate(self.all)}
        counts = np.zeros(len(places), dtype=np.int64)
        for seed in range(first, first + samples):
            result = generator.generate(
                self.prompt,
                max_tokens=self.emitted + 2,  # so that no counted token ends the budget
                stop_tokens=(),
                sampling=Sampling(seed=seed, **options),
            )
            counts[places[tuple(result.tokens[: self.emitted])]] += 1
        return counts


def excess(counts: NDArray[np.int64], distribution: NDArray[np.float64]) -> float:
    """Return chi-square over its bound at alpha 1e-4, by Wilson and Hilferty's cube.

    Asserts that no text of probability 0 was counted.
    """
    assert counts[distribution == 0].sum() == 0
    expected = distribution * counts.sum()
    rare = expected < 5
    seen = np.append(counts[~rare], counts[rare].sum())
    due = np.append(expected[~rare], expected[rare].sum())
    seen, due = seen[due > 0], due[due > 0]
    statistic = float(((seen - due) ** 2 / due).sum())
    spread = 2 / (9 * (len(due) - 1))
    cube: float = (1 - spread + NORMAL * spread**0.5) ** 3
    return statistic / ((len(due) - 1) * cube)

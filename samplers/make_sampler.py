"""`make_sampler` with mlx-lm's signature, for text that a seed determines."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_speculation.samplers.logits.filters import apply_filters
from mlx_speculation.samplers.sampling import Sampling


@dataclass(frozen=True, slots=True)
class SeededSampler:
    """A sampler whose options `mlx_speculation.stream_generate` reads.

    `stream_generate` does not call the sampler, but chooses tokens by its options, with
    noise that follows from a seed. Called by mlx-lm, the sampler draws from mlx's
    global generator.
    """

    sampling: Sampling  # its options

    def __call__(self, log_probs: mx.array) -> mx.array:
        """Draw one token per row of log-probabilities [rows, vocab], uint32 [rows]."""
        if self.sampling.greedy:
            return mx.argmax(log_probs, axis=-1)
        rows = log_probs.astype(mx.float32)
        if self.sampling.filters:
            thrown = None
            if self.sampling.xtc_probability > 0:
                thrown = mx.random.uniform(shape=rows.shape[:-1])
            rows = apply_filters(rows, self.sampling, thrown)
        return mx.random.categorical(rows * (1 / self.sampling.temperature))


def make_sampler(
    temp: float = 0.0,
    top_p: float = 0.0,
    min_p: float = 0.0,
    min_tokens_to_keep: int = 1,
    top_k: int = 0,
    xtc_probability: float = 0.0,
    xtc_threshold: float = 0.1,
    xtc_special_tokens: Sequence[int] | None = None,
) -> SeededSampler:
    """Make a sampler, as `mlx_lm.sample_utils.make_sampler` does.

    With this sampler and a seed, `stream_generate` gives the same text for every draft.
    `Sampling` describes the options.

    Raises:
        InvalidRequestError: a value is out of its range.
    """
    return SeededSampler(
        Sampling(
            temperature=temp,
            top_p=top_p,
            min_p=min_p,
            min_tokens_to_keep=min_tokens_to_keep,
            top_k=top_k,
            xtc_probability=xtc_probability,
            xtc_threshold=xtc_threshold,
            xtc_special_tokens=xtc_special_tokens or (),
        )
    )

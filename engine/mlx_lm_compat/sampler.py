"""Conversion of mlx-lm's samplers to `Sampling`."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import greedy_sampler

from mlx_speculation.errors import InvalidRequestError, SamplerNotice
from mlx_speculation.samplers import LogitsProcessor, Sampling, SeededSampler

NOTICE = (
    "The sampler draws its own random numbers. The text keeps its distribution, but "
    "the text of a seed depends on the draft, fewer drafted tokens are accepted, and "
    "the sampler is also called for rejected ones. mlx_speculation.make_sampler has "
    "mlx-lm's options, and gives the same text for every draft; num_draft_tokens=0 "
    "drafts nothing."
)


def checked_sampling(
    sampler: Any,
    processors: Sequence[LogitsProcessor] | None,
    seed: int | None,
    *,
    drafted: bool,
) -> Sampling:
    """Return a sampler's options, with a seed.

    Raises:
        InvalidRequestError: `seed` is not None, but the sampler draws its own random
            numbers.
    """
    if sampler is None or sampler is greedy_sampler:
        options = Sampling()
    elif isinstance(sampler, SeededSampler):
        options = sampler.sampling
    else:
        options = Sampling(sampler=sampler)
        if seed is not None:
            raise InvalidRequestError(
                f"seed is {seed!r}, but the sampler draws its own random numbers. Call "
                "mx.random.seed, or use mlx_speculation.make_sampler."
            )
        if drafted:
            warnings.warn(NOTICE, SamplerNotice, stacklevel=3)
    if seed is None:
        seed = 0
        if not options.greedy and options.sampler is None:
            # 62 bits of mlx's global random generator
            drawn: Any = mx.random.randint(0, 2**31 - 1, (2,)).tolist()
            seed = int(drawn[0]) << 31 | int(drawn[1])
    return replace(options, logits_processors=tuple(processors or ()), seed=seed)

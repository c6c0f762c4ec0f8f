"""Answers of a target to a batch of prompts, as token ids."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler

LEAST = 16  # tokens of an answer; fewer are not enough to evaluate a draft


def write_answers(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],  # token ids, at least one in each
    *,
    most: int,  # the largest number of tokens of an answer
    temperature: float,  # 0: greedy
    ends: Sequence[int],  # ids that end an answer; the answer includes its end
    seed: int,
    # Drops tokens whose probability is below this share of the greatest probability
    min_p: float = 0.0,
    # Called after each step once an answer has `LEAST` tokens; True ends all answers
    stop: Callable[[], bool] = lambda: False,
) -> list[list[int]]:
    """Return the target's continuation of each prompt."""
    mx.random.seed(seed)
    generator = BatchGenerator(
        model,
        max_tokens=most,
        stop_tokens=[[end] for end in ends],
        sampler=make_sampler(temperature, min_p=min_p),
        completion_batch_size=len(prompts),
        prefill_batch_size=len(prompts),
    )
    try:
        numbers = generator.insert([list(prompt) for prompt in prompts])
        result: dict[int, list[int]] = {number: [] for number in numbers}
        ended = 0
        while ended < len(prompts):
            for each in generator.next_generated():
                result[each.uid].append(each.token)
                ended += each.finish_reason is not None
            if max(map(len, result.values())) >= LEAST and stop():
                break
    finally:
        generator.close()
    return list(result.values())


def end_ids(tokenizer: Any) -> list[int]:
    """Return the ids that end an answer."""
    return sorted(int(end) for end in tokenizer.eos_token_ids if end is not None)

"""Tokens per second with a draft and without, measured alternately."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

from mlx_speculation.engine import SpeculativeGenerator
from mlx_speculation.training.data.dialogues import Dialogue

TOKENS = 96
PAYS = 1.05  # times plain decoding; a smaller gain is within the noise of measuring


@dataclass(frozen=True, slots=True)
class Speeds:
    """Measured speeds."""

    plain: float  # tokens per second without a draft
    drafted: float  # tokens per second with the draft, at adaptive draft lengths
    length: float  # mean tokens of a round
    texts: int  # number of texts written with and without draft
    equal: int  # number of texts that are the same with and without draft

    @property
    def pays(self) -> bool:
        """Return whether the draft speeds decoding up by more than noise."""
        return self.drafted > PAYS * self.plain


def measure_speeds(
    model: nn.Module,  # the target
    tokenizer: Any,  # its tokenizer
    draft: Any,  # the `draft=` of a generator
    dialogues: Sequence[Dialogue],  # their prompts are used
    *,
    texts: int = 8,  # the most prompts to use
    until: float | None = None,  # a time of `time.monotonic`; None: no limit
) -> Speeds | None:
    """Write greedy answers to held-out prompts, alternately with and without draft.

    Returns:
        The speeds; None: the time was up before the first text.
    """
    longest = 0.0  # estimated seconds to write a text with and without draft

    def over() -> bool:
        return until is not None and time.monotonic() + longest > until

    arms = [
        SpeculativeGenerator(model, tokenizer),
        SpeculativeGenerator(model, tokenizer, draft=draft),
    ]
    prompts = [_prompt(each) for each in dialogues if not each.temperature]
    prompts = prompts[:: max(1, len(prompts) // texts)][:texts]
    if over():
        return None
    for arm in arms:  # warm-up: compiles kernels, and measures costs of draft lengths
        began = time.monotonic()
        arm.generate(prompts[0], max_tokens=TOKENS // 2)
        longest = max(longest, 4 * (time.monotonic() - began))
    seconds, tokens, rounds = [0.0, 0.0], [0, 0], [0, 0]
    equal = count = 0
    for prompt in prompts:
        if over():
            break
        started = time.monotonic()
        written = []
        for number, arm in enumerate(arms):
            began = time.perf_counter()
            result = arm.generate(prompt, max_tokens=TOKENS)
            seconds[number] += time.perf_counter() - began
            written.append(list(result.tokens))
            tokens[number] += len(result.tokens)
            rounds[number] += result.stats.rounds
        equal += written[0] == written[1]
        count += 1
        longest = time.monotonic() - started
    if not count:
        return None
    return Speeds(
        plain=tokens[0] / seconds[0],
        drafted=tokens[1] / seconds[1],
        length=tokens[1] / max(1, rounds[1]),
        texts=count,
        equal=equal,
    )


def _prompt(dialogue: Dialogue) -> list[int]:
    begin = int(dialogue.counts.argmax())
    return list(map(int, dialogue.tokens[:begin]))

"""Tiny targets, their plain texts and generators, for tests of heads and blocks."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import mlx.nn as nn

from mlx_speculation import Sampling, SpeculativeGenerator
from support.identity import GREEDY, SAMPLED, prompt_of
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer

PROMPT = 40  # tokens, more than a window of 16
# Dense, hybrid, sliding with full layers, sliding alone.
TARGETS = ("llama", "qwen3_5", "gemma3_text", "llama(sliding)")


def sampling(temperature: float) -> Sampling:
    return SAMPLED if temperature else GREEDY


class DraftedTargets:
    """Targets by name, each built once; `depths` sets the number of layers of some."""

    def __init__(self, tokens: int, depths: Mapping[str, int] | None = None) -> None:
        self._tokens = tokens
        self._depths = depths or {}
        self.target = cache(self._target)
        self.text = cache(self._text)

    def _target(self, name: str) -> nn.Module:
        return build(name, layers=self._depths.get(name))

    def _text(self, name: str, temperature: float) -> list[int]:
        """Return a prompt and its plain continuation, longer than a test needs."""
        tokens = prompt_of(PROMPT)
        result = self.generator(name, None).generate(
            tokens, max_tokens=self._tokens + 12, sampling=sampling(temperature)
        )
        return tokens + result.tokens

    def generator(self, name: str, draft: Any, **options: Any) -> SpeculativeGenerator:
        options.setdefault("draft_length", 3)
        return SpeculativeGenerator(
            self.target(name), byte_tokenizer(), draft=draft, **options
        )

"""Batches of tiny models: expected texts, and drafts that are sometimes right."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_map

from mlx_speculation import (
    BatchGenerator,
    LookupDraft,
    Sampling,
    SpeculativeGenerator,
)
from mlx_speculation.caches.journals.ragged_kv import RaggedJournal
from mlx_speculation.models import PREFILL_STEP
from mlx_speculation.samplers import Chooser
from support.identity import ROUNDING, assert_same_text, prompt_of
from support.models.recurrent_models import RECURRENT_MODELS
from support.models.tiny_models import TINY_MODELS, build_tiny
from support.models.tiny_tokenizer import byte_tokenizer

MODELS = TINY_MODELS | RECURRENT_MODELS
LONGEST = 20  # tokens of a text; enough to push the prompt out of a window of 16
PROMPTS = (1, 2, 6, 17, 23, 40)  # numbers of tokens; windows hold 16
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.8, seed=1),
    Sampling(temperature=0.8, seed=2),
    Sampling(temperature=0.8, top_p=0.9, seed=3),
    Sampling(temperature=1.1, top_k=20, xtc_probability=0.4, seed=4),
    Sampling(temperature=0.8, repetition_penalty=1.2, seed=5),
)


def noisy(model: nn.Module, name: str, share: float = 0.01) -> nn.Module:
    """Return the model with slightly changed weights: a draft that is often right."""
    other = build_tiny(MODELS[name])
    key = mx.random.key(7)

    def shifted(weight: mx.array) -> mx.array:
        nonlocal key
        key, noise_key = mx.random.split(key)
        if not mx.issubdtype(weight.dtype, mx.floating):
            return weight
        return weight + share * weight.std() * mx.random.normal(
            weight.shape, key=noise_key
        )

    other.update(tree_map(shifted, model.parameters()))
    mx.eval(other.parameters())
    return other


class Watched:
    """Records the shapes [rows, positions] of a model's forwards; one may fail.

    Forward number `fail_at`, counted from 1, fails. With `width`, only forwards of one
    row with this many positions are counted.
    """

    def __init__(
        self,
        model: nn.Module,
        fail_at: int = 0,
        error: BaseException | None = None,
        width: int | None = None,
    ) -> None:
        self.model, self.plain = model, type(model)
        self.left, self.width = fail_at, width
        self.error = KeyboardInterrupt() if error is None else error
        self.shapes: list[tuple[int, int]] = []

    def __enter__(self) -> list[tuple[int, int]]:
        watched, plain = self, self.plain

        def call(module: Any, inputs: mx.array, *args: Any, **options: Any) -> Any:
            shape = inputs.shape[0], inputs.shape[1]
            watched.left -= watched.width is None or shape == (1, watched.width)
            if watched.left == 0:
                watched.left = -1
                raise watched.error
            watched.shapes.append(shape)
            return plain.__call__(module, inputs, *args, **options)

        body = {"__call__": call, "__module__": plain.__module__}
        self.model.__class__ = type(plain.__name__, (plain,), body)
        return self.shapes

    def __exit__(self, *error: object) -> None:
        self.model.__class__ = self.plain


@dataclass(frozen=True, slots=True)
class Case:
    prompt: int
    sampling: Sampling
    max_tokens: int
    draft_length: int | None = None
    prefill_step: int = PREFILL_STEP


@dataclass(slots=True)
class Bench:
    """A target, a draft model, and the target's texts of single rows."""

    name: str
    model: nn.Module
    draft: nn.Module
    texts: dict[tuple[int, Sampling, int], list[int]] = field(default_factory=dict)
    ties: int = 0  # near-ties so far

    def generator(self, kind: str, **options: Any) -> SpeculativeGenerator:
        """Return a generator with a draft of a kind: "model", "lookup" or "none"."""
        draft: Any = {"model": self.draft, "lookup": None, "none": None}[kind]
        if kind == "lookup":
            draft = LookupDraft(corpus=self.corpus())
        made: dict[str, Any] = {"draft": draft, "draft_length": 4}
        return SpeculativeGenerator(self.model, byte_tokenizer(), **(made | options))

    def corpus(self, prompts: Sequence[int] = PROMPTS) -> list[list[int]]:
        """Return prompts with their texts, of which every ninth token is wrong."""
        texts = []
        for prompt in prompts:
            for sampling in SAMPLINGS[:3]:
                text = self.text(prompt, sampling)[:LONGEST]
                wrong = [(t + (i % 9 == 8)) % 256 for i, t in enumerate(text)]
                texts.append(prompt_of(prompt) + wrong)
        return texts

    def text(
        self,
        prompt: int,
        sampling: Sampling,
        prefill_step: int = PREFILL_STEP,
        least: int = LONGEST,
    ) -> list[int]:
        """Return at least `least` tokens of plain decoding of one request."""
        options = prompt, sampling, prefill_step
        if len(self.texts.get(options, [])) < least:
            plain = SpeculativeGenerator(self.model, byte_tokenizer())
            result = plain.generate(
                prompt_of(prompt),
                max_tokens=least,
                sampling=sampling,
                stop_tokens=(),
                prefill_step_size=prefill_step,
            )
            self.texts[options] = result.tokens
        return self.texts[options]

    def insert(self, batch: BatchGenerator, case: Case) -> int:
        return batch.insert(
            prompt_of(case.prompt),
            max_tokens=case.max_tokens,
            sampling=case.sampling,
            stop_tokens=(),
            draft_length=case.draft_length,
            prefill_step_size=case.prefill_step,
        )

    def check(self, case: Case, tokens: list[int], *, width: int = 5) -> None:
        """Require that a row's tokens equal the beginning of the row's plain text."""
        least = max(LONGEST, len(tokens))
        text = self.text(case.prompt, case.sampling, case.prefill_step, least)
        expected = text[: len(tokens)]
        if tokens == expected:
            return
        sampling = case.sampling.with_seed()
        tie = assert_same_text(
            self.model,
            Chooser(sampling, 256),
            prompt_of(case.prompt),
            expected,
            tokens,
            width=width,
            bitwise=MODELS[self.name].bitwise,
        )
        assert tie is not None
        assert tie.difference < ROUNDING
        self.ties += 1


@cache
def bench(name: str) -> Bench:
    model = build_tiny(MODELS[name])
    return Bench(name, model, noisy(model, name))


def interrupt_commit(
    batch: BatchGenerator, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raise KeyboardInterrupt in the `calls`-th commit of a cache of the target."""
    plain, left = RaggedJournal.commit, [calls]

    def commit(self: Any, keep: Any) -> None:
        if self._cache in batch._groups[None]._lane.caches:
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
        plain(self, keep)

    monkeypatch.setattr(RaggedJournal, "commit", commit)


def run(batch: BatchGenerator) -> None:
    while batch.waiting or batch.running:
        batch.next()


def finish(made: Bench, batch: BatchGenerator, rows: dict[int, Case]) -> None:
    """Run to the end; check the texts, and that no memory is held."""
    run(batch)
    for uid, case in rows.items():
        result = batch.result(uid)
        assert len(result.tokens) == case.max_tokens
        made.check(case, result.tokens)
    assert batch.memory == 0


def three_rounds_of_eight(batch: BatchGenerator, rows: list[int]) -> None:
    """Start eight requests; then clear the caller's `rows`, and run three rounds."""
    for n in range(8):
        batch.insert(prompt_of(9 + n), max_tokens=40, stop_tokens=())
    while len(batch.running) < 8:
        batch.next()
    batch.next()
    rows.clear()
    for _ in range(3):
        batch.next()
    assert len(batch.running) == 8

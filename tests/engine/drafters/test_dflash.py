"""Drafting blocks with DFlash: context, positions, and the text as it was.

Faults that were made by hand, and found here:
    a row of the block stays in the caches; the context does not
    a discarded round is counted as held; the block begins with the token before
    more drafts are made than a block has
"""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlx_speculation import Sampling, SpeculativeGenerator, demo_models
from mlx_speculation.engine import DFlashDraft
from mlx_speculation.engine.drafters import mtp as mtp_module
from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models import HiddenStates
from support.identity import GREEDY, SAMPLED, plain_text, prompt_of
from support.models.dflash_checkpoints import BLOCK, DIM, VARIANTS, VOCAB, write_dflash
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer

PROMPT, TOKENS = 40, 24  # more than a window of 16
TARGETS = ("llama", "qwen3_5", "gemma3_text", "llama(sliding)")
# The last one of llama's and qwen3_5's: its state is that after the norm.
LAYERS = {"llama": (0, 1), "llama(sliding)": (0, 1), "gemma3_text": (0, 1, 2)}
CASES = [
    *(("full", name) for name in TARGETS),
    *((variant, "llama") for variant in VARIANTS if variant != "full"),
]


@cache
def target_of(name: str) -> nn.Module:
    """Return a target."""
    return build(name)


@cache
def draft_of(variant: str, name: str) -> DFlashDraft:
    """Return a random drafter on a target."""
    with TemporaryDirectory() as folder:
        written = write_dflash(Path(folder), variant, LAYERS.get(name, (0, 1, 3)))
        return DFlashDraft.from_folder(written, target_of(name))


@cache
def text_of(name: str, temperature: float) -> list[int]:
    """Return a prompt and its plain continuation, longer than will be asked for."""
    tokens = prompt_of(PROMPT)
    result = SpeculativeGenerator(target_of(name), byte_tokenizer()).generate(
        tokens, max_tokens=TOKENS + 12, sampling=sampling(temperature)
    )
    return tokens + result.tokens


def sampling(temperature: float) -> Sampling:
    """Return how tokens are chosen."""
    return SAMPLED if temperature else GREEDY


def generator(name: str, draft: Any, **options: Any) -> SpeculativeGenerator:
    """Return a generator on a target."""
    options.setdefault("draft_length", 3)
    return SpeculativeGenerator(
        target_of(name), byte_tokenizer(), draft=draft, **options
    )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("variant", "name"), CASES)
def test_a_drafter_leaves_the_text_as_plain_decoding_has_it(
    variant: str, name: str, temperature: float
) -> None:
    text = text_of(name, temperature)
    result = generator(name, draft_of(variant, name)).generate(
        text[:PROMPT], max_tokens=TOKENS, sampling=sampling(temperature)
    )
    assert result.tokens == text[PROMPT : PROMPT + TOKENS]
    assert not result.stats.drafter_faults
    assert result.stats.sources["dflash"].drafted >= TOKENS // 2
    assert result.stats.reruns == 0
    if not temperature:
        expected = plain_text(target_of(name), text[:PROMPT], TOKENS)
        assert result.tokens == expected


class OracleDFlash:
    """A drafter that says what comes next in a known text, and checks what it is given.

    Its one cache holds the positions of the context, and of blocks while a round runs.
    """

    def __init__(
        self, draft: DFlashDraft, text: list[int], wrong: Callable[[int], bool]
    ) -> None:
        self.head, self.states = self, draft.dflash.states
        self.ids, self.depth = None, BLOCK - 1
        self._text, self._wrong = text, wrong
        layers = draft.dflash.layers
        taps = HiddenStates(draft.model, layers=layers, after_norm=True)
        with taps.collect() as found:
            draft.model(mx.array([text]))
        self._context = self.states(found)
        self.blocks: list[tuple[int, int]] = []
        self.fed = 0

    def new_caches(self) -> list[Any]:
        return [KVCache()]

    def history(self, context: mx.array, caches: Sequence[Any]) -> None:
        self.fed += self._write(context, caches)

    def block(
        self, context: mx.array, token: mx.array, caches: Sequence[Any], count: int
    ) -> mx.array:
        self._write(context, caches)
        newest = caches[0].offset
        assert token.tolist() == [[self._text[newest]]]
        rows = mx.full((1, 1, BLOCK, 1), -1.0)
        caches[0].update_and_fetch(rows, rows)
        self.blocks.append((newest, context.shape[1]))
        ids = [self._guess(newest + j) for j in range(1, 1 + count)]
        logits = mx.where(mx.arange(VOCAB) == mx.array(ids)[:, None], 100.0, -100.0)
        return logits[None]

    def _write(self, context: mx.array, caches: Sequence[Any]) -> int:
        (each,) = caches
        start, count = each.offset, context.shape[1]
        assert context.shape == (1, count, DIM)
        expected = self._context[:, start : start + count]
        assert mx.allclose(context, expected, atol=1e-3)
        rows = mx.arange(start, start + count).astype(mx.float32)[None, None, :, None]
        each.update_and_fetch(rows, rows)
        return count

    def _guess(self, position: int) -> int:
        if position >= len(self._text):
            return 0
        return (self._text[position] + self._wrong(position)) % VOCAB


def oracle(
    name: str, text: list[int], wrong: Callable[[int], bool] = lambda position: False
) -> tuple[DFlashDraft, OracleDFlash]:
    """Return a draft with an oracle in the drafter's place."""
    known = draft_of("full", name)
    draft = DFlashDraft(known.model, known.dflash.head, known.dflash.layers)
    knowing = OracleDFlash(draft, text, wrong)
    draft.dflash = knowing  # type: ignore[assignment]
    return draft, knowing


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("name", TARGETS)
def test_an_oracle_is_always_right(name: str, length: int, temperature: float) -> None:
    text = text_of(name, temperature)
    draft, _ = oracle(name, text)
    result = generator(name, draft, draft_length=length).generate(
        text[:PROMPT], max_tokens=TOKENS, sampling=sampling(temperature)
    )
    assert not result.stats.drafter_faults
    assert result.tokens == text[PROMPT : PROMPT + TOKENS]
    assert result.stats.acceptance_rate == 1.0
    assert result.stats.mean_accepted_length > length + 0.7


@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize("name", TARGETS)
def test_the_context_is_that_of_committed_text(name: str, every: int) -> None:
    text = text_of(name, 0.0)
    draft, knowing = oracle(name, text, lambda position: position % every == 0)
    stream = generator(name, draft, draft_length=4).stream(
        text[:PROMPT], max_tokens=TOKENS
    )
    assert [chunk.token for chunk in stream] == text[PROMPT : PROMPT + TOKENS]
    assert not stream.result.stats.drafter_faults
    drafter: Any = stream.request.drafter
    (held,) = drafter.inner._cache._caches
    keys, _ = held.keys_and_values()
    newest = knowing.blocks[-1][0]
    assert keys[0, 0, :, 0].tolist() == list(range(newest))
    # Each block is one call with the context since the one before.
    assert all(
        later[0] - earlier[0] == later[1]
        for earlier, later in zip(knowing.blocks, knowing.blocks[1:], strict=False)
    )


def test_a_block_is_the_most_that_is_drafted() -> None:
    text = text_of("llama", 0.0)
    draft, _ = oracle("llama", text)
    result = generator("llama", draft, draft_length=9).generate(
        text[:PROMPT], max_tokens=TOKENS
    )
    assert result.stats.acceptance_rate == 1.0
    assert len(result.stats.reached) == BLOCK - 1
    random = generator("llama", draft_of("full", "llama"), draft_length=9)
    stats = random.generate(text[:PROMPT], max_tokens=9).stats
    assert 0 < stats.drafted <= (BLOCK - 1) * stats.drafts


def test_a_long_prompt_is_fed_before_it_is_drafted_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mtp_module, "LONGEST_LAG", 8)
    text = text_of("llama", 0.0)
    draft, knowing = oracle("llama", text)
    result = generator("llama", draft).generate(text[:PROMPT], max_tokens=TOKENS)
    assert result.tokens == text[PROMPT : PROMPT + TOKENS]
    assert result.stats.acceptance_rate == 1.0
    assert knowing.fed == PROMPT - 2


@pytest.mark.parametrize("named", [True, False])
def test_a_passed_cache_costs_the_first_draft_alone(named: bool) -> None:
    """Its positions are not in the context, which begins behind them."""
    text, model = text_of("llama", 0.0), target_of("llama")
    plain = SpeculativeGenerator(model, byte_tokenizer())
    caches = make_prompt_cache(model)
    plain.generate(text[:PROMPT], max_tokens=0, prompt_cache=caches)
    result = generator("llama", draft_of("sliding", "llama")).generate(
        text[PROMPT : PROMPT + 1],
        max_tokens=TOKENS,
        prompt_cache=caches,
        cached_tokens=text[:PROMPT] if named else None,
    )
    assert result.tokens == text[PROMPT + 1 : PROMPT + 1 + TOKENS]
    assert not result.stats.drafter_faults
    assert result.stats.drafted >= TOKENS // 2


def test_a_folder_with_a_drafter_is_known_by_its_config(tmp_path: Path) -> None:
    """A tiny drafter is refused, and is known to be one."""
    folder = write_dflash(tmp_path, "full")
    with pytest.raises(ModelFolderError, match="fc of the DFlash drafter takes 192"):
        SpeculativeGenerator.from_pretrained(demo_models()["dense"], draft=folder)

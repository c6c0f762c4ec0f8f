"""Block drafters get the right context and positions, and do not change the text."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation import SpeculativeGenerator, demo_models
from mlx_speculation.engine import DFlashDraft
from mlx_speculation.engine.drafters import mtp as mtp_module
from mlx_speculation.errors import ModelFolderError
from support.covering import covering
from support.drafters.block_oracle import BlockOracle, load_block
from support.drafters.drafted_targets import (
    PROMPT,
    TARGETS,
    DraftedTargets,
    sampling,
)
from support.identity import plain_text
from support.models.block_checkpoints import PACKAGINGS
from support.models.dflash_checkpoints import VARIANTS, write_dflash
from support.models.tiny_tokenizer import byte_tokenizer

TOKENS = 16
# The default, (0, 1), includes the last layer of llama and qwen3_5. That layer is read
# after the final norm.
LAYERS = {"gemma3_text": (0, 1, 2)}
# One drafter of each kind, and one for each way to read a block.
KINDS = ("full", "dflash2", "deepspec", "speculators, given")
CASES = [
    *((kind, name) for kind in KINDS for name in TARGETS),
    *((name, "llama") for name in (*VARIANTS, *PACKAGINGS) if name not in KINDS),
]
# Every kind, every target and every way to hold the context. Other tests compare the
# drafts of other pairs with references.
QUICK = [
    *zip(KINDS, TARGETS, strict=True),
    *(("full", "qwen3_5"), ("dflash2", "llama")),
    *((name, "llama") for name in ("sliding", "not causal")),
]

TARGETED = DraftedTargets(TOKENS)
target_of, text_of, generator = TARGETED.target, TARGETED.text, TARGETED.generator


@cache
def draft_of(variant: str, name: str) -> DFlashDraft:
    return load_block(variant, target_of(name), LAYERS.get(name, (0, 1)))


@pytest.mark.parametrize(
    ("case", "temperature"), covering(CASES, (0.0, 0.8), quick=(0, QUICK))
)
def test_a_drafter_leaves_the_text_as_plain_decoding_has_it(
    case: tuple[str, str], temperature: float
) -> None:
    variant, name = case
    text, draft = text_of(name, temperature), draft_of(variant, name)
    result = generator(name, draft).generate(
        text[:PROMPT], max_tokens=TOKENS, sampling=sampling(temperature)
    )
    assert result.tokens == text[PROMPT : PROMPT + TOKENS]
    assert not result.stats.drafter_faults
    assert result.stats.sources[draft.kind].drafted >= TOKENS // 2
    assert result.stats.reruns == 0
    if not temperature:
        expected = plain_text(target_of(name), text[:PROMPT], TOKENS)
        assert result.tokens == expected


def oracle(
    name: str,
    text: list[int],
    wrong: Callable[[int], bool] = lambda position: False,
    kind: str = "full",
) -> tuple[DFlashDraft, BlockOracle]:
    known = draft_of(kind, name)
    draft = type(known)(known.model, known.head, known.dflash.layers)
    return draft, BlockOracle(draft, text, wrong)


@pytest.mark.parametrize(
    ("kind", "name", "length", "temperature"),
    covering(KINDS, TARGETS, (1, 3), (0.0, 0.8), pairs=[(0, 2), (2, 3)]),
)
def test_an_oracle_is_always_right(
    kind: str, name: str, length: int, temperature: float
) -> None:
    text = text_of(name, temperature)
    draft, _ = oracle(name, text, kind=kind)
    result = generator(name, draft, draft_length=length).generate(
        text[:PROMPT], max_tokens=TOKENS, sampling=sampling(temperature)
    )
    assert not result.stats.drafter_faults
    assert result.tokens == text[PROMPT : PROMPT + TOKENS]
    assert result.stats.acceptance_rate == 1.0
    assert result.stats.mean_accepted_length > length + 0.7


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_is_the_most_that_is_drafted(kind: str) -> None:
    text, depth = text_of("llama", 0.0), draft_of(kind, "llama").head.depth
    draft, _ = oracle("llama", text, kind=kind)
    result = generator("llama", draft, draft_length=9).generate(
        text[:PROMPT], max_tokens=TOKENS
    )
    assert result.stats.acceptance_rate == 1.0
    assert len(result.stats.reached) == depth
    random = generator("llama", draft_of(kind, "llama"), draft_length=9)
    stats = random.generate(text[:PROMPT], max_tokens=9).stats
    assert 0 < stats.drafted <= depth * stats.drafts


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
    """The drafter's context begins after the positions of the passed cache."""
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
    """The error names a drafter of a wrong size, and not an unknown model."""
    folder = write_dflash(tmp_path, "full")
    with pytest.raises(ModelFolderError, match="DFlash drafter has input size 192"):
        SpeculativeGenerator.from_pretrained(demo_models()["dense"], draft=folder)

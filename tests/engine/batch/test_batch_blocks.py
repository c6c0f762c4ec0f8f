"""Block drafters and P-EAGLE heads draft for all rows of a batch in one forward."""

from collections.abc import Callable
from typing import Any

import pytest

from mlx_speculation import BatchGenerator, Sampling
from mlx_speculation.models.dflash import attention
from support.drafters.batch_heads import (
    compare,
    drafts_alone,
    drafts_of,
    generator_of,
)
from support.drafters.batches import Case, three_rounds_of_eight
from support.drafters.block_oracle import load_block
from support.exact_drafters import peagle_on
from support.models.tiny_models import build

# Blocks with every mask and every way to choose tokens.
BLOCKS = ("full", "sliding", "not causal", "dflash2", "deepspec", "speculators, given")
OTHERS = (
    *("swa keys", "own ends", "dflash2, causal", "dflash2, scaled"),
    *("dflash2, speculators", "deepspec, gated", "deepspec, rnn", "deepspec, dflash"),
    *("deepspec, gemma", "speculators", "specforge", "lfm2", "nvidia", "prism"),
    *("qwen3.5", "mimo", "muse"),
)


def pair(kind: str, name: str = "llama") -> tuple[Any, Any]:
    if kind == "peagle":
        return peagle_on(name, (0, 1))
    model = build(name)
    return model, load_block(kind, model, (0, 1))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, "llama") for kind in (*BLOCKS, "peagle")),
        ("full", "qwen3_5"),
        *(pytest.param(kind, "llama", marks=pytest.mark.slow) for kind in OTHERS),
    ],
)
def test_drafts_of_blocks_are_those_of_the_rows_alone(kind: str, name: str) -> None:
    compare(generator_of(*pair(kind, name)))


@pytest.mark.parametrize("kind", ["dflash2", "deepspec", "peagle"])
@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_other_rules_give_rows_what_they_do_alone(kind: str, acceptance: Any) -> None:
    generator = generator_of(*pair(kind), acceptance=acceptance)
    cases = [
        Case(p, Sampling(temperature=0.8, seed=s), 10) for p, s in ((3, 1), (20, 2))
    ]
    for case, (result, drafts) in zip(cases, drafts_of(generator, cases), strict=True):
        alone, expected = drafts_alone(generator, case)
        assert drafts == expected != []
        assert result.tokens == alone.tokens
        assert result.stats.accepted == alone.stats.accepted


@pytest.mark.parametrize("kind", ["full", "dflash2", "deepspec", "peagle"])
def test_a_round_of_eight_is_one_forward_of_the_drafter(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = pair(kind)
    on_target: Any = type(draft.eagle if kind == "peagle" else draft.dflash)
    plain: Callable[..., None] = on_target.draft
    rows: list[int] = []

    def noting(head: Any, hidden: Any, *args: Any) -> None:
        rows.append(len(hidden))
        plain(head, hidden, *args)

    monkeypatch.setattr(on_target, "draft", noting)
    with BatchGenerator(generator_of(target, draft)) as batch:
        three_rounds_of_eight(batch, rows)
        assert not batch.stats.alone
    assert rows == [8, 8, 8]


def test_a_mask_of_one_text_for_all_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shorter text then sees keys after its end, and `compare` fails."""
    plain = attention._mask

    def of_one(size: int, rows: int, window: Any, causal: bool, start: Any) -> Any:
        return plain(size, rows, window, causal, 0)

    monkeypatch.setattr(attention, "_mask", of_one)
    with pytest.raises(AssertionError):
        compare(generator_of(*pair("full")))

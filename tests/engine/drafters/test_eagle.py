"""Drafting with an EAGLE-3 or P-EAGLE head: its ids, and the unchanged text."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from mlx_speculation import SpeculativeGenerator, demo_models
from mlx_speculation.demo import demo_prompts
from mlx_speculation.engine import CascadeDraft, EagleDraft, MtpDrafter, Proposal
from mlx_speculation.engine.drafters.registry import draft_folder
from mlx_speculation.errors import (
    DraftNotice,
    InvalidRequestError,
    ModelFolderError,
)
from support.covering import covering
from support.drafters.drafted_targets import (
    PROMPT,
    TARGETS,
    DraftedTargets,
    sampling,
)
from support.identity import plain_text, prompt_of
from support.models.eagle_checkpoints import DIALECTS, PARALLEL, draft_ids, write_eagle
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer

# Some heads have no list of layers.
pytestmark = pytest.mark.filterwarnings("ignore:.*lists no layers of its target")

TOKENS = 16
LAYERS = {"llama(sliding)": (0, 1), "gemma3_text": (0, 1, 2)}
# Most heads here read layers 0, 1 and 3, so these targets get 4 layers.
DEPTHS = {"llama": 4, "qwen3_5": 4}


TARGETED = DraftedTargets(TOKENS, DEPTHS)
target_of, text_of, generator = TARGETED.target, TARGETED.text, TARGETED.generator


@cache
def draft_of(dialect: str, name: str) -> Any:
    with TemporaryDirectory() as made:
        written = write_eagle(Path(made), dialect, LAYERS.get(name, (0, 1, 3)))
        folder, source = draft_folder(written)
        return source.from_folder(folder, target_of(name))  # type: ignore[attr-defined]


OTHERS = [dialect for dialect in DIALECTS if dialect != "specforge"]
CASES = [
    *(("specforge", name) for name in TARGETS),
    # The authors' files name no layers, so 0, 2 and 3 of the target's 4 are read.
    *((dialect, "qwen3_5" if dialect == "authors" else "llama") for dialect in OTHERS),
    *((dialect, name) for dialect in PARALLEL for name in TARGETS),
]
# The other pairs are slow: other tests compare their drafts with references.
QUICK = [
    *CASES[: len(TARGETS)],
    *(("authors", "qwen3_5"), ("whole", "llama"), ("several layers", "llama")),
    *(("peagle", "qwen3_5"), ("aws", "llama(sliding)"), ("qwen3", "gemma3_text")),
]


@pytest.mark.parametrize(
    ("case", "temperature"),
    covering(CASES, (0.0, 0.8), quick=(0, QUICK)),
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
def test_a_head_leaves_the_text_as_plain_decoding_has_it(
    case: tuple[str, str], temperature: float
) -> None:
    dialect, name = case
    text = text_of(name, temperature)
    result = generator(name, draft_of(dialect, name)).generate(
        text[:PROMPT], max_tokens=TOKENS, sampling=sampling(temperature)
    )
    assert result.tokens == text[PROMPT : PROMPT + TOKENS]
    kind = "peagle" if dialect in PARALLEL else "eagle"
    assert result.stats.sources[kind].drafted >= TOKENS // 2
    assert result.stats.reruns == 0
    assert not result.stats.drafter_faults
    if not temperature:
        expected = plain_text(target_of(name), text[:PROMPT], TOKENS)
        assert result.tokens == expected


def test_a_reduced_vocabulary_is_all_that_is_drafted() -> None:
    """The table d2t gives the id of each column of the head's logits."""
    name = "llama"
    draft = draft_of("specforge", name)
    drafted: list[int] = []
    inner = MtpDrafter.propose

    def noting(self: Any, *args: Any) -> Proposal:
        proposal = inner(self, *args)
        drafted.extend(int(token) for token in proposal.tokens)
        return proposal

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MtpDrafter, "propose", noting)
        generator(name, draft).generate(prompt_of(PROMPT), max_tokens=TOKENS)
    assert drafted
    assert set(drafted) <= set(draft_ids())
    assert max(drafted) >= len(draft_ids())


def test_the_named_number_of_drafts_is_the_most() -> None:
    text = text_of("llama", 0.0)
    named = generator("llama", draft_of("peagle", "llama"), draft_length=9)
    stats = named.generate(text[:PROMPT], max_tokens=TOKENS).stats
    assert 0 < stats.drafted <= 5 * stats.drafts
    free = generator("llama", draft_of("aws", "llama"), draft_length=9)
    stats = free.generate(text[:PROMPT], max_tokens=TOKENS).stats
    assert stats.drafted > 5 * stats.drafts


def test_a_folder_with_a_head_is_known_by_its_config(tmp_path: Path) -> None:
    """The error names a head of a wrong size, and not an unknown model."""
    folder = write_eagle(tmp_path, "specforge")
    with pytest.raises(ModelFolderError, match="head has target_hidden_size 64"):
        SpeculativeGenerator.from_pretrained(demo_models()["dense"], draft=folder)


def test_the_reading_that_a_probe_puts_first_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def others_first(head: Any, model: Any, readings: Any, starts: Any) -> Any:
        return dict.fromkeys(reversed(readings.layers))

    home = "mlx_speculation.models.eagle.load.probe_layers"
    monkeypatch.setattr(home, others_first)
    folder, target = write_eagle(tmp_path, "specforge", (1, 2, 3)), target_of("llama")
    usual = EagleDraft.from_folder(folder, target)
    with pytest.warns(DraftNotice, match=r"layers \[0, 1, 2\] are read"):
        probed = EagleDraft.from_folder(folder, target, tokenizer=byte_tokenizer())
    assert usual.eagle.layers == (1, 2, 3)
    assert probed.eagle.layers == (0, 1, 2)


@pytest.mark.slow  # the quick test is in test_resolve_named.py
def test_the_trained_head_is_as_right_as_in_its_training() -> None:
    """In its training, 3.03 of 4 tokens were right, on 64 windows of held-out code."""
    made = SpeculativeGenerator.from_pretrained(
        demo_models()["dense"], draft=demo_models()["eagle"], draft_length=4
    )
    texts = [prompt.text for prompt in demo_prompts() if prompt.group == "edit"]
    accepted = rounds = 0
    for text in texts[:1]:
        expected = made.generate(text, max_tokens=16, draft_length=0).tokens
        result = made.generate(text, max_tokens=16)
        assert result.tokens == expected
        assert not result.stats.drafter_faults
        accepted += result.stats.accepted
        rounds += result.stats.drafts
    assert accepted / rounds > 2.5


def test_heads_of_other_models_and_ids_are_refused() -> None:
    draft = draft_of("vllm", "llama")
    with pytest.raises(InvalidRequestError, match="with another model"):
        SpeculativeGenerator(build("qwen3"), byte_tokenizer(), draft=draft)
    with pytest.raises(InvalidRequestError, match="2 heads"):
        generator("llama", CascadeDraft(draft, draft_of("specforge", "llama")))
    with pytest.raises(InvalidRequestError, match="256 embeddings"):
        draft.check_ids(256)
    highest = max(draft_ids())
    draft.check_ids(highest)
    with pytest.raises(InvalidRequestError, match=f"ids up to {highest}"):
        draft.check_ids(highest - 1)

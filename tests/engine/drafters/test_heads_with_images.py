"""Heads that read the target's states, with images in the prompt."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_speculation import Sampling, SpeculativeGenerator
from mlx_speculation.engine import AssistantDraft, PEagleDraft
from mlx_speculation.models.gemma_assistant import Assistant
from mlx_speculation.models.gemma_assistant.config import read_assistant_settings
from mlx_speculation.models.vision import ImageForward, ImagePrompt, VisionTarget
from support.drafters import block_oracle
from support.drafters.block_oracle import BlockOracle, load_block
from support.models import (
    assistant_checkpoints,
    block_checkpoints,
    dflash_checkpoints,
    eagle_checkpoints,
)
from support.models.tiny_models import TINY_MODELS, randomise
from support.models.tiny_vision import (
    FAMILIES,
    VOCAB,
    WITHOUT_MLX_VLM,
    prompt_with,
    tiny,
    tokenizer,
)
from support.references import assistant_oracles
from support.references.assistant_oracles import OracleStep

pytestmark = WITHOUT_MLX_VLM

TOKENS, WINDOW = 12, 8
TWO = [(2, 4), (6, 4)]
GREEDY, SAMPLED = Sampling(seed=0), Sampling(temperature=0.8, top_p=0.9, seed=11)
# One drafter of each kind that drafts a block in one forward
BLOCKS = ("full", "dflash2", "deepspec")
ASSISTANT = "assistant"
PEAGLE = "peagle"
NAMES = ("qwen2_5_vl", "qwen3_5", "gemma3", "llava")


class Seeing(VisionTarget):
    """A target that an oracle can call with a whole text, images included."""

    prompt: ImagePrompt

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        if inputs.shape[1] < self.prompt.input_ids.shape[1]:
            return super().__call__(inputs, cache)
        length = self.prompt.input_ids.shape[1]
        run, caches = ImageForward(self, self.prompt), cache or self.make_cache()
        run(inputs[:, :length], caches)
        return run(inputs[:, length:], caches)

    @property
    def model(self) -> Any:
        return self.language_model.model


def seeing(name: str) -> Seeing:
    target = Seeing(tiny(name).vlm)
    target.prompt = prompt_with(name, TWO)
    return target


@pytest.fixture(autouse=True)
def _ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the heads the same number of ids as the targets."""
    for module in (
        assistant_checkpoints,
        block_checkpoints,
        dflash_checkpoints,
        eagle_checkpoints,
        block_oracle,
        assistant_oracles,
    ):
        monkeypatch.setattr(module, "VOCAB", VOCAB)
    monkeypatch.setattr(assistant_oracles, "WINDOW", WINDOW)
    args = FAMILIES["gemma4"]["text_config"]
    settings = {"vision": replace(TINY_MODELS["gemma4_text"], args=args)}
    monkeypatch.setattr(assistant_checkpoints, "_ALL", settings)


def draft_of(kind: str, target: VisionTarget, folder: Path) -> Any:
    if kind == ASSISTANT:
        config = assistant_checkpoints.config_of("vision")
        assistant: Any = Assistant(read_assistant_settings(config))
        randomise(assistant, embedding=0.5)
        return AssistantDraft(target, assistant)
    if kind == PEAGLE:
        written = eagle_checkpoints.write_eagle(folder, "aws", (0, 1))
        return PEagleDraft.from_folder(written, target)
    return load_block(kind, target, (0, 1))


def generate(
    target: Any, sampling: Sampling, draft: Any = None, length: int = 3
) -> Any:
    made = SpeculativeGenerator(target, tokenizer(), draft=draft, draft_length=length)
    return made.generate(
        target.prompt,
        max_tokens=TOKENS,
        sampling=sampling,
        stop_tokens=(),
        prefill_step_size=7,
    )


def cases(kinds: tuple[str, ...], *quick: tuple[str, str]) -> list[Any]:
    """Return pairs of a head and a family; all but the `quick` ones are slow."""
    slow = pytest.mark.slow
    pairs = [(kind, name) for kind in kinds for name in NAMES] + [(ASSISTANT, "gemma4")]
    return [one if one in quick else pytest.param(*one, marks=slow) for one in pairs]


@pytest.mark.parametrize(
    ("kind", "name"),
    cases((*BLOCKS, PEAGLE), ("dflash2", "gemma3"), (PEAGLE, "qwen2_5_vl")),
)
def test_a_head_leaves_the_text_as_it_is(kind: str, name: str, tmp_path: Path) -> None:
    target = seeing(name)
    draft = draft_of(kind, target, tmp_path)
    for sampling in (GREEDY, SAMPLED):
        result = generate(target, sampling, draft)
        assert result.tokens == generate(target, sampling).tokens
        assert result.stats.drafted >= TOKENS // 2
        assert not result.stats.drafter_faults


@pytest.mark.parametrize(
    ("kind", "name"),
    cases(BLOCKS, ("full", "qwen2_5_vl"), ("deepspec", "llava"), (ASSISTANT, "gemma4")),
)
def test_an_oracle_is_always_right(kind: str, name: str, tmp_path: Path) -> None:
    """The oracle compares its input states with those of one forward over the text."""
    target = seeing(name)
    for sampling in (GREEDY, SAMPLED):
        long = SpeculativeGenerator(target, tokenizer()).generate(
            target.prompt, max_tokens=TOKENS + 12, sampling=sampling, stop_tokens=()
        )
        text = target.prompt.tokens + long.tokens
        draft = draft_of(kind, target, tmp_path)
        if kind == ASSISTANT:
            draft.step = OracleStep(draft, text)
        else:
            BlockOracle(draft, text)
        result = generate(target, sampling, draft)
        assert not result.stats.drafter_faults
        assert result.tokens == long.tokens[:TOKENS]
        assert result.stats.acceptance_rate == 1.0

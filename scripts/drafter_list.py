"""The drafters that exist for a target, and runs of them whose text is checked."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.nn as nn

from mlx_speculation import (
    Cascade,
    LookupDrafter,
    Sampling,
    SpeculativeGenerator,
    load,
)
from mlx_speculation.demo import demo_models
from mlx_speculation.engine import Statistics
from mlx_speculation.engine.draft_length.policy_factory import LONGEST
from mlx_speculation.engine.drafters.resolve import find_draft, resolve
from mlx_speculation.engine.drafters.source import TargetInfo
from mlx_speculation.engine.equivalence.texts import find_parting
from mlx_speculation.errors import (
    ConventionError,
    ModelFolderError,
    UnsupportedModelError,
)
from mlx_speculation.models import TokenIds, logit_width
from mlx_speculation.samplers import Chooser

# Folders beside the bundled models -> the target that the head in it was trained on.
HEADS = {"eagle": "dense", "assistant": "sliding"}
# What a lookup has to match before it goes before the draft model in the cascade.
LONG_MATCH = 6


@dataclass(frozen=True, slots=True)
class Source:
    """A drafter.

    Attributes:
        name: in the table.
        generator: of the target, with this drafter.
    """

    name: str
    generator: SpeculativeGenerator


@dataclass(slots=True)
class Bench:
    """A target, and its plain texts.

    Attributes:
        folder: the target's.
        model: the target.
        tokenizer: its.
        plain: its generator without a draft.
    """

    folder: Path
    model: nn.Module
    tokenizer: Any
    plain: SpeculativeGenerator
    _texts: dict[tuple[str, int, Sampling], list[int]] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> "Bench":
        """Load a target."""
        model, tokenizer = load(folder)
        return cls(folder, model, tokenizer, SpeculativeGenerator(model, tokenizer))

    def checked_run(
        self,
        source: Source,
        prompt: str,
        tokens: int,
        sampling: Sampling,
        length: int | None,
    ) -> tuple[Statistics, int]:
        """Continue a prompt with drafts, and check the text.

        Args:
            source: the drafter.
            prompt: the text that is continued.
            tokens: how many are generated.
            sampling: how they are chosen.
            length: tokens drafted in a round; None: by measurement.

        Returns:
            The counts, and 1 if the text parts from plain decoding's where rounding
            decides, else 0.

        Raises:
            AssertionError: it parts elsewhere, or a drafter has failed.
        """
        options: dict[str, Any] = {
            "max_tokens": tokens,
            "sampling": sampling,
            "stop_tokens": (),
        }
        key = (prompt, tokens, sampling)
        if key not in self._texts:
            self._texts[key] = self.plain.generate(prompt, **options).tokens
        result = source.generator.generate(prompt, draft_length=length, **options)
        assert not result.stats.drafter_faults, result.stats.drafter_faults
        if result.tokens == self._texts[key]:
            return result.stats, 0
        ids = TokenIds.of(self.tokenizer)
        width = logit_width(self.model)
        parting = find_parting(
            self.model,
            Chooser(sampling, ids.width, limit=width, missing=ids.missing),
            [int(token) for token in self.plain.tokenizer.encode(prompt)],
            self._texts[key],
            result.tokens,
            width=(length or LONGEST) + 1,
        )
        assert parting is not None
        assert parting.near_tie, f"{source.name}: not the text of plain: {parting}"
        return result.stats, 1


def sources_of(
    bench: Bench, draft: Path, heads: Sequence[Path], bundled: str | None
) -> list[Source]:
    """Return the drafters of a target.

    Args:
        bench: the target.
        draft: the folder of the draft model.
        heads: folders of further heads.
        bundled: the name of the target, if it is a bundled one.
    """
    small = _source(bench, draft)
    found: dict[str, Any] = {"model": small}
    with suppress(ConventionError, ModelFolderError, UnsupportedModelError):
        found["mtp"] = _source(bench, "mtp")  # most folders have none
    beside = demo_models()["draft"].parent
    own = [beside / name for name, target in HEADS.items() if target == bundled]
    for folder in [*(each for each in own if each.is_dir()), *heads]:
        source = _source(bench, folder)
        found[source.kind] = source
    found["lookup"] = LookupDrafter()
    found["cascade"] = Cascade(LookupDrafter(minimum_match=LONG_MATCH), small)
    return [
        Source(name, SpeculativeGenerator(bench.model, bench.tokenizer, draft=each))
        for name, each in found.items()
    ]


def compiled_source(bench: Bench, draft: Path) -> Source:
    """Return the draft model with its steps compiled, as a model of its own.

    Every model is hooked by itself.

    Raises:
        InvalidRequestError: its steps cannot be compiled, or not here.
        UnsupportedModelError: likewise.
    """
    small = _source(bench, draft)
    generator = SpeculativeGenerator(
        bench.model, bench.tokenizer, draft=small, compile_draft=True
    )
    return Source("compiled", generator)


def _source(bench: Bench, draft: str | Path) -> Any:
    """Return what a name or a folder becomes for this target."""
    target = TargetInfo(bench.model, bench.tokenizer, bench.folder, 0)
    return resolve(find_draft(draft, target=bench.folder), target).source


def added(total: Statistics, counts: Statistics) -> Statistics:
    """Return the counts of two generations together."""
    names = ("rounds", "drafts", "drafted", "accepted", "emitted", "empty_drafts")
    for name in names:
        setattr(total, name, getattr(total, name) + getattr(counts, name))
    total.reached += [0] * (len(counts.reached) - len(total.reached))
    for index, reached in enumerate(counts.reached):
        total.reached[index] += reached
    return total

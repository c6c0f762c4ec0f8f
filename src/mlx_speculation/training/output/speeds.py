"""Tokens per second with and without a draft, and speculation.json if it pays."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn

from mlx_speculation.engine import SpeculativeGenerator
from mlx_speculation.errors import ConventionError, SpeculationError
from mlx_speculation.json_files import write_json
from mlx_speculation.models.checkpoints.speculation_json import NAME
from mlx_speculation.training.data.dialogues import Dialogue

TOKENS = 96  # the maximum number of tokens of a text
TEXTS = 8  # the maximum number of prompts to use
PAYS = 1.05  # relative to plain decoding; a smaller gain is within measuring noise


@dataclass(frozen=True, slots=True)
class Speeds:
    """Measured speeds."""

    plain: float  # tokens per second without the draft
    drafted: float  # tokens per second with the draft, at adaptive draft lengths
    length: float  # mean number of tokens that a round emits
    texts: int  # number of texts, each written with and without the draft
    equal: int  # number of texts that are the same in both

    @property
    def pays(self) -> bool:
        """Return whether the draft speeds up decoding by more than noise."""
        return self.drafted > PAYS * self.plain


def measured(
    model: nn.Module,
    tokenizer: Any,
    draft: Path,
    dialogues: Sequence[Dialogue],
    until: float | None,
) -> tuple[Speeds | None, str]:
    """Return the speeds, and the reason why speculation.json should not name the draft.

    Speeds are None if not measured. The reason is empty if the draft pays. `until` is a
    time of `time.monotonic`; None: no limit.
    """
    prompts = [
        [int(token) for token in each.tokens[: int(each.counts.argmax())]]
        for each in dialogues
        if not each.temperature
    ]
    prompts = prompts[:: max(1, len(prompts) // TEXTS)][:TEXTS]
    try:
        generator = SpeculativeGenerator(model, tokenizer, draft=str(draft))
        speeds = _by_turns(generator, prompts, until)
    except ConventionError as error:  # the head has learned almost nothing
        return None, f"It drafts hardly better than by chance. {error}"
    except SpeculationError as error:  # not raised, since the training is complete
        return None, f"Its speed could not be measured. {error}"
    if speeds is None:
        return None, (
            "The time is up, and its speed was not measured: `mlx-speculation "
            "benchmark` does that."
        )
    if not speeds.pays:
        return speeds, "It does not pay here, so speculation.json does not name it."
    return speeds, ""


def _by_turns(
    generator: SpeculativeGenerator,
    prompts: Sequence[list[int]],
    until: float | None,
) -> Speeds | None:
    """Write greedy answers, each with and without draft; None: no time for one."""
    longest = 0.0  # estimated seconds to write a text with and without draft

    def over() -> bool:
        return until is not None and time.monotonic() + longest > until

    if over():
        return None
    arms = (0, None)  # draft lengths: plain, adaptive
    for arm in arms:  # warm-up: compiles kernels, and measures costs of draft lengths
        began = time.monotonic()
        generator.generate(prompts[0], max_tokens=TOKENS // 2, draft_length=arm)
        longest = max(longest, 4 * (time.monotonic() - began))
    seconds, tokens = [0.0, 0.0], [0, 0]
    equal = count = rounds = 0
    for prompt in prompts:
        if over():
            break
        started = time.monotonic()
        written = []
        for number, arm in enumerate(arms):
            began = time.perf_counter()
            result = generator.generate(prompt, max_tokens=TOKENS, draft_length=arm)
            seconds[number] += time.perf_counter() - began
            tokens[number] += len(result.tokens)
            rounds += result.stats.rounds if arm is None else 0
            written.append(result.tokens)
        equal += written[0] == written[1]
        count += 1
        longest = time.monotonic() - started
    if not count:
        return None
    plain, drafted = (n / spent for n, spent in zip(tokens, seconds, strict=True))
    return Speeds(plain, drafted, tokens[1] / max(1, rounds), count, equal)


def pair_with(target: Path, draft: Path, kind: str) -> str:
    """Name a draft in the target's speculation.json; return a line for the user.

    An existing speculation.json is not changed. The draft is named only if its folder
    is in the target's folder or beside it. `kind`: as in speculation.json, such as
    "eagle" or "model".
    """
    file, target, draft = target / NAME, target.resolve(), draft.resolve()
    if not draft.is_relative_to(target.parent):
        return (
            f"draft='auto' finds drafts in {str(target)!r} or beside it: move the "
            f"folder there, and write {NAME}, or pass draft={str(draft)!r}."
        )
    if file.exists():
        return f"{str(file)!r} is there already, and was left as it is."
    inside = draft.is_relative_to(target)
    name = draft.relative_to(target if inside else target.parent).as_posix()
    try:
        write_json(file, {"draft": name if inside else f"../{name}", "kind": kind})
    except OSError as error:
        return f"{str(file)!r} could not be written: {error.strerror}."
    return f"{str(file)!r} names it: draft='auto' takes it from now on."

"""Compares texts in exact mode with and without a drafter, bit for bit.

Heads have random weights. A drafter's logits are therefore raised at tokens of the
plain text, so that most drafted tokens are accepted. `compare` runs in a process of its
own, where OpenBLAS can be loaded.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation import CascadeDraft, LookupDraft, Sampling, SpeculativeGenerator
from mlx_speculation.caches import FixedShape
from mlx_speculation.engine import AssistantDraft, PEagleDraft
from mlx_speculation.engine.drafters.fault_guard import CheckedChoose
from mlx_speculation.engine.result import Result
from mlx_speculation.samplers import Choice, Rows
from support.drafters.batch_heads import eagle_on, mtp_on
from support.drafters.block_oracle import load_block
from support.fixed_shape import with_openblas_in_front
from support.identity import GREEDY, SAMPLED, prompt_of
from support.models import assistant_checkpoints
from support.models.eagle_checkpoints import write_eagle
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer

# ROWS is the default number of rows of a forward. With six rows, even texts in exact
# mode differ under OpenBLAS on a CPU without AVX-512. With this STEP, the views grow
# several times in every text.
ROWS, STEP = 8, 16
PROMPT, TOKENS = 21, 40  # more than a window of 16
SAMPLINGS = {"greedy": GREEDY, "sampled": SAMPLED}
RIGHT = 0.8
Pair = tuple[nn.Module, Any]


@dataclass(frozen=True, slots=True)
class Found:
    """Comparison of a text with drafts and a text without."""

    tokens: int  # number of differing tokens, in exact mode
    logprobs: int  # number of differing log-probabilities, in exact mode
    control: int  # like `logprobs`, but without exact mode; may be above 0
    accepted: int  # number of accepted tokens, in exact mode
    rejected: int  # number of rejected tokens, in exact mode


@contextmanager
def pushed_towards(text: Sequence[int], right: float, seed: int) -> Iterator[None]:
    """Let drafters choose the text's tokens, each with probability `right`."""
    draw = random.Random(seed)
    pushed = [draw.random() < right for _ in text]
    choose = CheckedChoose.__call__

    def push(
        self: CheckedChoose, logits: mx.array, rows: Rows, ids: mx.array | None = None
    ) -> Choice:
        first = rows.start + len(rows.known) + rows.lead - rows.count + 1
        places = mx.arange(logits.shape[-1]) if ids is None else ids
        wanted = [
            text[at] if at < len(text) and pushed[at] else -1
            for at in range(first, first + rows.count)
        ]
        hit = places[None] == mx.array(wanted)[:, None]
        return choose(self, mx.where(hit, logits + 1e4, logits), rows, ids)

    with patch.object(CheckedChoose, "__call__", push):
        yield


def block_on(kind: str, name: str, layers: tuple[int, ...]) -> Pair:
    model = build(name)
    return model, load_block(kind, model, layers)


def peagle_on(name: str, layers: tuple[int, ...]) -> Pair:
    model = build(name)
    with TemporaryDirectory() as folder:
        written = write_eagle(Path(folder), "qwen3", layers)
        return model, PEagleDraft.from_folder(written, model)


def assistant_on(name: str) -> Pair:
    made = assistant_checkpoints.make(name)
    return made.target, AssistantDraft(made.target, made.assistant)


def with_eagle(name: str, *others: Any) -> Pair:
    """Return a target, and a random EAGLE-3 head, alone or last in a cascade."""
    model = build(name)
    head = eagle_on(model)
    return model, CascadeDraft(*others, head) if others else head


def _cascade(name: str) -> Pair:
    short = LookupDraft()
    return with_eagle(name, short)


def _models(name: str) -> Pair:
    return build(name), CascadeDraft(LookupDraft(), build(name, seed=1))


# A name consists of the kind of drafter and the kind of the target's layers.
PAIRS: dict[str, Callable[[], Pair]] = {
    "mtp, dense": lambda: mtp_on("mimo"),
    "mtp, latent": lambda: mtp_on("deepseek_v3"),
    "mtp, hybrid": lambda: mtp_on("qwen3_5"),
    "mtp, sliding": lambda: mtp_on("mimo_v2_flash"),
    "eagle, dense": lambda: with_eagle("llama"),
    "eagle, hybrid": lambda: with_eagle("qwen3_5"),
    "eagle, sliding": lambda: with_eagle("llama(sliding)"),
    "dflash, dense": lambda: block_on("full", "llama", (0, 1)),
    "dflash, hybrid": lambda: block_on("full", "qwen3_5", (0, 1)),
    "dflash, sliding": lambda: block_on("full", "gemma3_text", (0, 1, 2)),
    "dspark, dense": lambda: block_on("deepspec", "llama", (0, 1)),
    "dspark, hybrid": lambda: block_on("speculators, given", "qwen3_5", (0, 1)),
    "peagle, sliding": lambda: peagle_on("gemma3_text", (0, 1, 2)),
    "assistant, sliding": lambda: assistant_on("unshared"),
    "assistant, shared": lambda: assistant_on("shared"),
    "assistant, gemma3": lambda: assistant_on("gemma3"),
    "lookup and eagle, dense": lambda: _cascade("llama"),
    "lookup and model, hybrid": lambda: _models("qwen3_5"),
    "lookup and eagle, sliding": lambda: _cascade("llama(sliding)"),
}


def written(
    model: nn.Module, draft: Any, sampling: Sampling, *, exact: int | bool = ROWS
) -> Result:
    """Return a generated text; in exact mode, the views grow by `STEP`."""
    with patch(
        "mlx_speculation.engine.options.generator.FixedShape",
        lambda rows: FixedShape(rows, STEP),
    ):
        generator = SpeculativeGenerator(
            model,
            byte_tokenizer(),
            draft=draft,
            draft_length=0 if draft is None else 9,
            exact=exact,
        )
    return generator.generate(
        prompt_of(PROMPT),
        max_tokens=TOKENS,
        sampling=sampling,
        stop_tokens=(),
        logprobs=3,
        logprob_rows=True,
    )


def compare_pair(name: str, sampling: Sampling, seed: int = 0) -> Found:
    model, draft = PAIRS[name]()
    plain = written(model, None, sampling)
    loose = written(model, None, sampling, exact=False)
    with pushed_towards(prompt_of(PROMPT) + plain.tokens, RIGHT, seed):
        drafted = written(model, draft, sampling)
        control = written(model, draft, sampling, exact=False)
    assert not drafted.stats.drafter_faults, drafted.stats.drafter_faults[0].details
    return Found(
        _differing(drafted.tokens, plain.tokens),
        _differing(drafted.logprobs, plain.logprobs),
        _differing(control.logprobs, loose.logprobs),
        drafted.stats.accepted,
        drafted.stats.drafted - drafted.stats.accepted,
    )


def _differing(some: Sequence[Any] | None, others: Sequence[Any] | None) -> int:
    assert some
    assert others
    return sum(a != b for a, b in zip(some, others, strict=True))


def compare(cases: Sequence[tuple[str, str]]) -> None:
    for name, chosen in cases:
        differences = compare_pair(name, SAMPLINGS[chosen])
        print(json.dumps(asdict(differences)))  # noqa: T201


def compared(cases: Sequence[tuple[str, str]]) -> list[Found]:
    """Return the results of `compare` in a process that uses OpenBLAS."""
    lines = with_openblas_in_front(f"compare({list(cases)})", __name__)
    return [Found(**json.loads(line)) for line in lines]

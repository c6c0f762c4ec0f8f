"""Records the proposals of a drafter at every position of texts.

Draft length policies are tuned by replaying such traces. The text of a seed does not
depend on the drafts, and a proposal depends only on the tokens before it. So one long
draft at each position gives the result of every shorter draft from there.

    python scripts/traces.py traces.npz --model FOLDER --draft lookup \
        --name smollm2-lookup --prompts question.jsonl --per-group 4

This command adds a pair of model and draft to traces.npz, or more texts if the pair is
there. Its last line is a JSON object. The defaults of --model and --prompts are the
bundled dense model and prompts. The tests and scripts/draft_length.py replay the files
in tests/support/draft_length/.

A chat model ends its texts itself; other texts end after --tokens. Arrays named
`NAME/GROUP/...` have one row for each text of a pair, with zeros after its end:
    right     uint8 [texts, tokens], number of drafted tokens before the first wrong one
    found     uint8 [texts, tokens], number of drafted tokens
    context   int32 [texts], number of tokens of the prompt
    tokens    int32 [texts], number of tokens after the prompt
The array `NAME/costs` has the processor time of rounds that draft `NAME/lengths`
tokens, divided by that of a plain step.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from mlx_speculation.blas import use_blas

if __name__ == "__main__":
    use_blas("auto")

import mlx.core as mx

from bench.prompts import bundled, read_questions
from mlx_speculation import LookupDraft, SpeculativeGenerator, load
from mlx_speculation.demo import demo_models
from mlx_speculation.engine.draft_length.calibration import calibration_prompt
from mlx_speculation.engine.drafters.base import NOTHING, Choose, Drafter, Proposal
from mlx_speculation.engine.drafters.draft import Draft
from mlx_speculation.engine.lookup.drafter import measured_draft
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.models import Lane
from mlx_speculation.samplers import Sampling

DRAFTED = 15  # tokens, at each position
CONTEXT = 256  # tokens in the caches when costs are measured
LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
ROUNDS, PLAIN_ROUNDS = 16, 48


class Recorded(Draft):
    """Keeps the long proposals of another draft, and proposes nothing."""

    def __init__(self, inner: Draft) -> None:
        self.inner = inner
        self.kind, self.follows = inner.kind, inner.follows
        self.drafts: dict[int, list[int]] = {}

    def open(
        self, lane: Lane, sequence: Sequence, draft_cache: list[Any] | None = None
    ) -> Drafter:
        """Return the drafter of a stream; forget the drafts of the previous one."""
        self.drafts = {}
        return Recorder(self.inner.open(lane, sequence, draft_cache), self.drafts)


class Recorder:
    """The drafter of one stream; `drafts` maps a number of known tokens to a draft."""

    def __init__(self, inner: Drafter, drafts: dict[int, list[int]]) -> None:
        self._inner, self._drafts = inner, drafts

    def begin(self, sequence: Sequence) -> None:
        """Let the recorded drafter begin."""
        self._inner.begin(sequence)

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        """Keep the drafter's proposal, and propose nothing."""
        draft = self._inner.propose(sequence, DRAFTED, choose)
        tokens: Any = draft.tokens.tolist()
        self._drafts[len(sequence.tokens)] = tokens
        self._inner.discard()
        return NOTHING

    def settle(self, accepted: int) -> None:
        """Do nothing: nothing was proposed."""

    def discard(self) -> None:
        """Do nothing: the draft is already discarded."""


def record(
    generator: SpeculativeGenerator,
    source: Recorded,
    prompt: list[int],
    tokens: int,
    sampling: Sampling,
) -> dict[str, np.ndarray]:
    """Return the arrays of one text."""
    chats = generator.tokenizer.has_chat_template
    result = generator.generate(
        prompt,
        max_tokens=tokens + 2,  # drafters propose nothing at a budget's last two tokens
        sampling=sampling,
        stop_tokens=None if chats else (),
        draft_length=DRAFTED,
    )
    if result.stats.drafter_faults:
        raise RuntimeError(str(result.stats.drafter_faults[0]))
    text, length = [*prompt, *result.tokens], min(tokens, len(result.tokens))
    right = np.zeros(tokens, np.uint8)
    value = np.zeros(tokens, np.uint8)
    for known, drafted in source.drafts.items():
        place = known - len(prompt)
        if place >= length:
            continue
        agree = [a == b for a, b in zip(drafted, text[known:], strict=False)]
        right[place] = [*agree, False].index(False)
        value[place] = len(drafted)
    return {"right": right, "found": value, "tokens": np.array(length, np.int32)}


def costs_of(model: Any, tokenizer: Any, draft: Draft) -> list[float]:
    """Return the cost of a round with each of `LENGTHS`, in plain steps."""
    generator = SpeculativeGenerator(model, tokenizer, draft=measured_draft(draft))
    seconds = []
    for length in LENGTHS:
        stream = generator.stream(
            calibration_prompt(CONTEXT),
            max_tokens=1 << 20,
            stop_tokens=(),
            draft_length=length,
        )
        rounds = PLAIN_ROUNDS if length == 0 else ROUNDS
        for _ in range(4):
            stream.next_round()
        started = time.process_time()
        for _ in range(rounds):
            stream.next_round()
        seconds.append((time.process_time() - started) / rounds)
        stream.close()
    return [each / seconds[0] for each in seconds]


def main() -> None:
    """Record one pair."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="file, new or to be added to")
    parser.add_argument("--name", required=True, help="name of the pair")
    parser.add_argument("--model", type=Path, default=demo_models()["dense"])
    said = "draft, as SpeculativeGenerator takes it"
    parser.add_argument("--draft", default="lookup", help=said)
    parser.add_argument("--prompts", type=Path, help="JSON lines with `turns`")
    parser.add_argument("--per-group", type=int, default=3)
    parser.add_argument("--group", help="use only this group of prompts")
    parser.add_argument("--first", type=int, default=0, help="prompts to skip")
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    model, tokenizer = load(options.model)
    model.set_dtype(mx.float32)
    draft: Any = options.draft
    if draft == "lookup":
        draft = LookupDraft(history=0)  # no history between texts
    usual = SpeculativeGenerator(model, tokenizer, draft=draft)
    assert usual._setup.draft is not None
    source = Recorded(usual._setup.draft)
    generator = SpeculativeGenerator(model, tokenizer, draft=source)
    arrays: dict[str, np.ndarray] = {}
    if options.out.exists():
        arrays |= dict(np.load(options.out))
    name = options.name
    if f"{name}/costs" not in arrays:
        costs = np.array(costs_of(model, tokenizer, usual._setup.draft), np.float32)
        arrays |= {f"{name}/lengths": np.array(LENGTHS), f"{name}/costs": costs}
    mean: dict[str, float] = {}
    groups, stop = options.group and [options.group], options.first + options.per_group
    questions = bundled(groups, stop)
    if options.prompts is not None:
        questions = read_questions(options.prompts, groups, stop)
    for group, each_question in questions.items():
        texts = []
        for seed, question in enumerate(each_question[options.first :], options.first):
            sampling = Sampling(temperature=options.temperature, seed=seed)
            prompt = question.prompt(tokenizer)
            text = record(generator, source, prompt, options.tokens, sampling)
            texts.append(text | {"context": np.array(len(prompt), np.int32)})
        for key in texts[0]:
            place = f"{name}/{group}/{key}"
            new = np.stack([text[key] for text in texts])
            before = [arrays[place]] if place in arrays else []
            arrays[place] = np.concatenate([*before, new])
        mean[group] = round(float(arrays[f"{name}/{group}/right"].mean()), 3)
        print(group, mean[group], flush=True)
    np.savez_compressed(options.out, **arrays)  # type: ignore[arg-type]
    print(json.dumps({"name": name, "right": mean, "file": str(options.out)}))


if __name__ == "__main__":
    main()

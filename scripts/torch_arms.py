"""Arms of transformers: plain decoding and assisted generation, on the same weights.

Its rounds are counted from what its target is asked and what it streams: a forward over
n candidates brings n + 1 rows of logits, and its streamer gets the accepted tokens with
the one behind them. transformers itself reports no acceptance.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmark_arms import Arm, Job, Models, Run
from torch_twins import TOLERANCE, Twin, UnlikeError, load_twin
from transformers.utils import logging

# Where assisted generation chooses its own lengths, it drafts at most so many tokens
# and stops at a token that the draft is unsure of.
LONGEST = 20
COMPARED = 300  # tokens at which the logits are compared
TRIED = 12  # tokens to find out how many threads are the fastest


@dataclass(slots=True)
class Streamer:
    """Takes the tokens of `generate` against the clock, round by round."""

    take: Callable[[list[int]], None]
    _begun: bool = False

    def put(self, value: Any) -> None:
        """Take a round's tokens; the first call brings the prompt."""
        if self._begun:
            self.take(value.flatten().tolist())
        self._begun = True

    def end(self) -> None:
        """Do nothing."""


def torch_arms(
    models: Models, target: Path, draft: Path, lengths: list[int], text: str
) -> tuple[list[Arm], str]:
    """Return transformers' arms, and a line on what they are or why there are none.

    Args:
        models: the same models for mlx-lm.
        target: the folder of the target.
        draft: the folder of the draft model.
        lengths: of drafts; beside them transformers' own choice is an arm.
        text: to compare logits at, and to find the fastest number of threads.
    """
    logging.set_verbosity_error()  # it warns of what its own assistants are passed
    ids = models.encode(text * 2)[:COMPARED]
    try:
        large, small = load_twin(target, ids), load_twin(draft, ids)
    except UnlikeError as error:
        return [], f"transformers: no arms, since {error}"
    threads = _fastest_threads(large, ids[:32])
    make = partial(Arm, "transformers", tolerance=TOLERANCE)
    arms = [make(0, partial(_plain, large))]
    arms += [make(n, partial(_assisted, large, small, n)) for n in lengths]
    arms.append(make(LONGEST, partial(_assisted, large, small, None), auto=True))
    return arms, (
        f"transformers: {type(large.model).__name__}, float32, {threads} threads; "
        f"logits within {max(large.difference, small.difference):.1g} of mlx-lm's"
    )


def _fastest_threads(twin: Twin, prompt: list[int]) -> int:
    """Let torch use as many threads as it decodes the fastest with; return how many."""
    seconds = {}
    job = Job(prompt, TRIED, 0.0, 0)
    for threads in {1, os.cpu_count() or 1}:
        torch.set_num_threads(threads)
        runs = [_plain(twin, job) for _ in range(2)]
        seconds[threads] = min(run.seconds for run in runs)
    best = min(seconds, key=lambda threads: seconds[threads])
    torch.set_num_threads(best)
    return best


def _plain(twin: Twin, job: Job) -> Run:
    run = Run()

    def take(tokens: list[int]) -> None:
        run.statistics.count(drafted=0, accepted=0, emitted=len(tokens))
        _note(run, tokens)

    _generate(twin, job, take)
    return run


def _assisted(twin: Twin, small: Twin, length: int | None, job: Job) -> Run:
    run = Run()
    rows: list[int] = []

    def take(tokens: list[int]) -> None:
        drafted = rows[-1] - 1
        run.statistics.count(
            drafted=drafted, accepted=len(tokens) - 1, emitted=len(tokens)
        )
        _note(run, tokens)

    settings = small.model.generation_config
    settings.num_assistant_tokens = LONGEST if length is None else length
    settings.num_assistant_tokens_schedule = "constant"
    settings.assistant_confidence_threshold = 0.4 if length is None else 0.0
    try:
        with _counted_rows(twin.model, rows):
            _generate(twin, job, take, assistant_model=small.model)
    except Exception as error:  # What it cannot do is a result, whatever it raises.
        when = f"failed after token {len(run.tokens)}" if run.tokens else "refused"
        run.failure = f"{when}: {type(error).__name__}: {error}"
    return run


@contextmanager
def _counted_rows(model: Any, rows: list[int]) -> Iterator[None]:
    """Note how many rows of logits each forward of a model returns."""
    hook = model.register_forward_hook(
        lambda _module, _inputs, output: rows.append(output.logits.shape[1])
    )
    try:
        yield
    finally:
        hook.remove()


def _note(run: Run, tokens: list[int]) -> None:
    """Take a round's tokens, by the rule of `Run.follow`."""
    now = time.perf_counter()
    if not run.tokens:
        run.first_seconds = now - run.begun
    else:
        run.timed += len(tokens)
        run.seconds = now - run.begun - run.first_seconds
    run.tokens += tokens


def _generate(
    twin: Twin, job: Job, take: Callable[[list[int]], None], **options: Any
) -> None:
    sampled = job.temperature > 0
    if sampled:
        # Its own defaults would keep 50 tokens; ours and mlx-lm's keep all.
        options |= {"temperature": job.temperature, "top_k": 0, "top_p": 1.0}
    torch.manual_seed(job.seed)
    prompt = torch.tensor([job.prompt])
    with torch.inference_mode():
        twin.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=job.tokens,
            do_sample=sampled,
            eos_token_id=None,
            pad_token_id=0,
            streamer=Streamer(take),
            **options,
        )

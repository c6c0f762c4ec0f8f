"""Our plain decoding against mlx-lm's, finely enough to tell a hundredth.

Two whole runs, one after the other, differ by more than the two loops do: a shared
machine drifts. So both run at the same time, by turns: one decodes a slice of tokens
while the other stands still, and the ratio is taken slice by slice.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from statistics import quantiles

import mlx.core as mx
from benchmark_arms import Job, Models
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.sample_utils import make_sampler

from mlx_speculation.engine.equivalence.texts import find_parting
from mlx_speculation.models import wired

SLICE = 16  # tokens
SLICES = 12  # of a run; the first is not counted


@dataclass(frozen=True, slots=True)
class PlainRatio:
    """The speed of our plain decoding over mlx-lm's `generate_step`.

    Attributes:
        target: its name.
        temperature: of the sampling.
        median: of the ratios of all slices.
        lower: a quarter of them lie below.
        upper: a quarter of them lie above.
        slices: how many there are.
    """

    target: str
    temperature: float
    median: float
    lower: float
    upper: float
    slices: int


def measure_plain(name: str, models: Models, job: Job, runs: int) -> PlainRatio:
    """Run both decoders by turns.

    Args:
        name: of the target, for the result.
        models: target and draft.
        job: the prompt and the sampling; the number of tokens is that of the slices.
        runs: how often, each with `SLICES - 1` counted slices; the odd ones begin
            with mlx-lm.

    Raises:
        AssertionError: at temperature 0 the texts differ, and not by rounding.
    """
    ratios: list[float] = []
    for run in range(runs):
        ratios += _one_run(models, job, run % 2)
    lower, median, upper = quantiles(ratios, n=4)
    return PlainRatio(name, job.temperature, median, lower, upper, len(ratios))


def _one_run(models: Models, job: Job, first: int) -> list[float]:
    count = SLICE * SLICES + 1
    with ExitStack() as stack:
        stack.enter_context(wired(models.target))
        ours = stack.enter_context(
            models.plain.stream(
                job.prompt, max_tokens=count, sampling=job.sampling, stop_tokens=()
            )
        )
        mx.random.seed(job.seed)
        theirs = generate_step(
            mx.array(job.prompt),
            models.bare[0],
            max_tokens=count,
            sampler=make_sampler(temp=job.temperature),
        )
        stack.callback(theirs.close)
        arms = ((chunk.token for chunk in ours), (int(token) for token, _ in theirs))
        texts: tuple[list[int], list[int]] = ([], [])
        ratios = []
        for number in range(SLICES):
            seconds = [0.0, 0.0]
            for arm in (0, 1) if (number + first) % 2 == 0 else (1, 0):
                wanted = SLICE + (number == 0)  # the first token brings the prefill
                seconds[arm] = _timed(arms[arm], texts[arm], wanted)
            ratios.append(seconds[1] / seconds[0])
    _check(models, job, *texts)
    return ratios[1:]


def _timed(arm: Iterator[int], text: list[int], count: int) -> float:
    """Take `count` tokens, with nothing in flight before and after; in seconds."""
    started = time.perf_counter()
    text += islice(arm, count)
    mx.synchronize()
    mx.synchronize(generation_stream)
    return time.perf_counter() - started


def _check(models: Models, job: Job, ours: list[int], theirs: list[int]) -> None:
    if job.temperature > 0:  # mlx-lm draws from the global generator
        return
    chooser = models.chooser(job)
    parting = find_parting(models.target, chooser, job.prompt, ours, theirs, width=1)
    if parting is not None and not parting.near_tie:
        raise AssertionError(f"plain decoding is not mlx-lm's: {parting}")

"""Ways to generate the texts of many prompts together, for benchmark_batch.py.

The clock runs from the call after that in which every prompt has got its first token,
to the end of the last text; prompts are not in it. Tokens are those of that time.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.generate import BatchGenerator as MlxLmBatchGenerator

from mlx_speculation import BatchGenerator, Sampling, SpeculativeGenerator, make_sampler
from mlx_speculation.engine import BatchStatistics


@dataclass(frozen=True, slots=True)
class Job:
    """Prompts that run together.

    Attributes:
        prompts: token ids.
        tokens: of each text.
        temperature: 0 is greedy.
    """

    prompts: list[list[int]]
    tokens: int
    temperature: float = 0.0

    @property
    def samplings(self) -> list[Sampling]:
        """One for each prompt, with a seed of its own."""
        rows = range(len(self.prompts))
        return [Sampling(temperature=self.temperature, seed=row) for row in rows]


@dataclass(frozen=True, slots=True)
class Run:
    """What one arm did with a job.

    Attributes:
        texts: the tokens of each prompt.
        timed: tokens against the clock.
        seconds: of them.
        stats: counts of the batch; None for mlx-lm's.
    """

    texts: list[list[int]]
    timed: int
    seconds: float
    stats: BatchStatistics | None = None

    @property
    def speed(self) -> float:
        """Tokens per second, of all texts together."""
        return self.timed / self.seconds


@dataclass(slots=True)
class Arm:
    """One way, and its runs.

    Attributes:
        name: for the table.
        run: does a job.
        width: the most tokens in one forward of a row.
        runs: the counted ones.
        warm_up: how many jobs it runs uncounted; more where it has to measure first.
    """

    name: str
    run: Callable[[Job], Run]
    width: int = 1
    warm_up: int = 1
    runs: list[Run] = field(default_factory=list)


def mlx_lm(model: Any, job: Job) -> Run:
    """Run mlx-lm's own batch generator."""
    rows = len(job.prompts)
    sampler = make_sampler(job.temperature) if job.temperature else None
    batch: Any = MlxLmBatchGenerator(
        model,
        max_tokens=job.tokens,
        sampler=sampler,
        prefill_batch_size=rows,
        completion_batch_size=rows,
    )
    texts: dict[int, list[int]] = {
        uid: [] for uid in batch.insert([list(prompt) for prompt in job.prompts])
    }
    started, timed, ended = None, 0, 0
    while ended < rows:
        responses = batch.next()[1]
        for response in responses:
            texts[response.uid].append(response.token)
            ended += response.finish_reason is not None
        if started is not None:
            timed += len(responses)
        elif all(texts.values()):
            started = time.perf_counter()
    assert started is not None
    seconds = time.perf_counter() - started
    batch.close()
    return Run(list(texts.values()), timed, seconds)


def ours(generator: SpeculativeGenerator, length: int | None, job: Job) -> Run:
    """Run a batch of ours; `length` is that of all drafts, or None."""
    with BatchGenerator(generator, max_rows=len(job.prompts)) as batch:
        uids = [
            batch.insert(
                prompt,
                max_tokens=job.tokens,
                sampling=sampling,
                stop_tokens=(),
                draft_length=length,
            )
            for prompt, sampling in zip(job.prompts, job.samplings, strict=True)
        ]
        while batch.waiting:  # as above: from where all of them are generating
            batch.next()
        before, started = batch.stats.emitted, time.perf_counter()
        while batch.running:
            batch.next()
        seconds = time.perf_counter() - started
        timed = batch.stats.emitted - before
        texts = [batch.remove(uid).tokens for uid in uids]
    return Run(texts, timed, seconds, batch.stats)


def run_in_turns(arms: Sequence[Arm], jobs: Sequence[Job], repeats: int) -> None:
    """Warm up, then let every arm run each job, another arm first each time."""
    for arm in arms:
        for number in range(arm.warm_up):
            arm.run(jobs[number % len(jobs)])
    for number in range(repeats):
        first = number % len(arms)
        for arm in [*arms[first:], *arms[:first]]:
            arm.runs.append(arm.run(jobs[number % len(jobs)]))

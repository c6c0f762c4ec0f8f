"""The rule on traces of real rounds: at most 3 % slower than plain decoding.

A pair is a target with one or two sources, a group is a kind of text. All groups
together are also compared with their best fixed lengths. `pytest -s` prints results.
"""

import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from bench.replays.replay import (
    MACHINES,
    Generator,
    Machine,
    Replayed,
    judged,
    machines_of,
    replay_batch,
    texts_of,
)
from mlx_speculation.engine.draft_length.rule import BATCH_CREDIT, Credit
from support.covering import covering
from support.draft_length import HELD_OUT, TRACES

PAIRS = (
    ("smollm2-lookup",),
    ("dense-model",),
    ("dense-lookup",),
    ("dense-eagle",),
    ("hybrid-mtp",),
    ("hybrid-lookup",),
    ("sliding-assistant",),
    ("dense-lookup", "dense-model"),
    ("dense-lookup", "dense-eagle"),
    ("hybrid-lookup", "hybrid-mtp"),
)
REQUESTS = (50, 100, 300)
QUICK = (0, ("cpu", "h100"))  # for other machines see test_rule_machines.py
LEAST_PLAIN = 0.97
# Least speed for all pairs together, relative to the best fixed lengths.
LEAST_SUM = 0.97


@cache
def traces(file: Path = TRACES) -> dict[str, np.ndarray]:
    return dict(np.load(file))


def check(
    file: Path, pairs: Sequence[tuple[str, ...]], name: str, tokens: int, least: float
) -> None:
    best = ours_in_steps = 0.0
    for pair in pairs:
        machine = machines_of(traces(file), pair)[name]
        for group in judged(traces(file), pair, machine, tokens):
            said = f"{'+'.join(pair)} {name}, {tokens} tokens, {group.group}: "
            said += f"{group.over_plain:.3f} of plain, best is {group.best}"
            sys.stdout.write(f"{said}\n")
            assert round(group.over_plain, 3) >= LEAST_PLAIN, said
            best, ours_in_steps = best + group.least, ours_in_steps + group.ours.steps
    sys.stdout.write(
        f"{name}, {tokens} tokens, all pairs: {best / ours_in_steps:.3f} of best\n"
    )
    assert best / ours_in_steps >= least


@pytest.mark.parametrize(("name", "tokens"), covering(MACHINES, REQUESTS, quick=QUICK))
def test_it_loses_nothing_to_plain_steps_and_little_to_the_best_single_source(
    name: str, tokens: int
) -> None:
    check(TRACES, PAIRS, name, tokens, LEAST_SUM)


@pytest.mark.parametrize(("name", "tokens"), covering(MACHINES, REQUESTS, quick=QUICK))
def test_neither_does_it_on_texts_that_chose_no_constant(
    name: str, tokens: int
) -> None:
    check(HELD_OUT, [*PAIRS, ("dense-model-0.8",)], name, tokens, LEAST_SUM)


@pytest.mark.parametrize(
    ("rows", "tokens"), covering([8, 32], [48, 100], quick=(0, [8]))
)
def test_a_batch_on_a_busy_device_loses_nothing_from_its_first_job_on(
    rows: int, tokens: int
) -> None:
    """One more position in each row costs half a plain step on this device."""
    drafting = {"model": 0.4, "mtp": 0.1, "eagle": 0.1, "assistant": 0.1}
    for pair in PAIRS:
        each = [0.5 + drafting.get(name.split("-")[1], 0.0) for name in pair]
        rounds = [[1 + cost * n for n in range(18)] for cost in each]
        known = Generator(pair, Credit(*BATCH_CREDIT))
        texts = [
            request
            for file in (TRACES, HELD_OUT)
            for group in texts_of(traces(file), pair).values()
            for text in group
            for request in text.requests(tokens)
            if len(request) == tokens
        ]
        random = np.random.default_rng(1)
        for job in range(6):
            chosen = random.choice(len(texts), rows, replace=len(texts) < rows)
            replayed = Replayed()
            batch = [texts[index] for index in chosen]
            replay_batch(known, Machine(rounds), batch, replayed)
            assert tokens / replayed.steps >= LEAST_PLAIN, (pair, job)


def test_a_machine_with_a_noisy_clock_loses_little() -> None:
    random = np.random.default_rng(0)
    noise = np.exp(0.08 * random.standard_normal(997))
    noise *= np.where(random.random(997) < 0.01, 3.0, 1.0)
    for pair in (
        ("smollm2-lookup",),
        ("dense-eagle",),
        ("hybrid-lookup", "hybrid-mtp"),
    ):
        for name in ("cpu", "h100"):
            machine = machines_of(traces(), pair)[name]
            noisy = Machine(machine.rounds, machine.left, machine.cold, noise.tolist())
            for group in judged(traces(), pair, noisy, 100):
                assert group.over_plain >= LEAST_PLAIN - 0.01

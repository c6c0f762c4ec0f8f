"""The adaptive policy on traces of real rounds: never slower than plain decoding.

Each group of each pair is replayed as the requests of one generator that knows nothing,
on measured and published costs, and compared with the best fixed length of that group.
`pytest -s` prints what came of each.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from bench.replays.replay import (
    MACHINES,
    Machine,
    Replayed,
    compared,
    generator_of,
    machines_of,
    run,
    texts_of,
)
from mlx_speculation.engine.draft_length.base import FixedDraftLength
from support.covering import covering
from support.draft_length import HELD_OUT, TRACES

pytestmark = pytest.mark.usefixtures("measured")
# Of cascades the rule decides, see `test_rule_replay`.
PAIRS = (
    ("smollm2-lookup",),
    ("dense-model",),
    ("dense-lookup",),
    ("dense-eagle",),
    ("hybrid-mtp",),
    ("hybrid-lookup",),
    ("sliding-assistant",),
)
REQUESTS = (50, 100, 300)
LEAST_PLAIN = 0.97
# Of all pairs together, and of each of them. In a request of 50 tokens the first one,
# which does not wait for a draft, is a fiftieth of them.
LEAST_SUM, LEAST_PAIR = 0.95, 0.93
# Of groups of two texts of 150 tokens, where the best of nine lengths has had luck.
HELD_OUT_SUM, HELD_OUT_PAIR = 0.94, 0.8


def said(line: str) -> None:
    sys.stdout.write(f"{line}\n")


@cache
def traces(file: Path = TRACES) -> dict[str, np.ndarray]:
    return dict(np.load(file))


def check(
    file: Path,
    pairs: Sequence[tuple[str, ...]],
    name: str,
    tokens: int,
    least: tuple[float, float],
) -> None:
    """Compare each group of each pair, each pair, and all of them together."""
    least_sum, least_pair = least
    best = own = 0.0
    for pair in pairs:
        machine = machines_of(traces(file), pair)[name]
        groups = list(compared(traces(file), pair, machine, tokens))
        for group in groups:
            said(f"{'+'.join(pair)} {name}, {tokens} tokens, {group}")
            assert group.over_plain >= LEAST_PLAIN, (pair, group.group)
        bests = sum(group.fixed[group.best] for group in groups)
        owns = sum(group.own.steps for group in groups)
        assert bests / owns >= least_pair, pair
        best, own = best + bests, own + owns
    said(f"{name}, {tokens} tokens, all pairs: {best / own:.3f} of best")
    assert best / own >= least_sum


@pytest.mark.parametrize(("name", "tokens"), covering(MACHINES, REQUESTS))
def test_it_loses_nothing_to_plain_steps_and_little_to_the_best_length(
    name: str, tokens: int
) -> None:
    check(TRACES, PAIRS, name, tokens, (LEAST_SUM, LEAST_PAIR))


@pytest.mark.parametrize(
    ("name", "tokens"), covering(MACHINES, REQUESTS, quick=(0, ["cpu", "h100"]))
)
def test_neither_does_it_on_texts_that_chose_no_policy(name: str, tokens: int) -> None:
    """Of other questions and prompts, and one of a higher temperature and new seeds."""
    pairs = [*PAIRS, ("dense-model-0.8",)]
    check(HELD_OUT, pairs, name, tokens, (HELD_OUT_SUM, HELD_OUT_PAIR))


def replayed(pair: tuple[str, ...], name: str) -> Replayed:
    machine = machines_of(traces(), pair)[name]
    texts = [text for each in texts_of(traces(), pair).values() for text in each]
    return run(generator_of(), machine, texts, 100, explain=True)


def test_a_replay_is_the_same_every_time_and_can_be_printed() -> None:
    pair = ("hybrid-mtp",)
    first, second = replayed(pair, "h100"), replayed(pair, "h100")
    assert first.decisions == second.decisions
    lines = [str(plan) for plan, _ in first.decisions or [] if plan.options]
    assert all("credit" in line for line in lines)
    assert len(set(lines)) > 50


def test_a_machine_with_a_noisy_clock_loses_little() -> None:
    random = np.random.default_rng(0)
    noise = np.exp(0.08 * random.standard_normal(997))
    noise *= np.where(random.random(997) < 0.01, 3.0, 1.0)
    for pair in (("dense-eagle",), ("hybrid-mtp",)):
        for name in ("cpu", "h100"):
            machine = machines_of(traces(), pair)[name]
            noisy = Machine(machine.rounds, machine.left, machine.cold, noise.tolist())
            for texts in texts_of(traces(), pair).values():
                plain = run(lambda: FixedDraftLength(0), machine, texts, 100)
                found = run(generator_of(), noisy, texts, 100)
                assert plain.steps / found.steps >= LEAST_PLAIN - 0.01


def test_later_streams_of_a_generator_begin_with_what_it_knows() -> None:
    found = replayed(("dense-model",), "cpu")
    decisions = found.decisions or []
    begins = [n for n, (p, _) in enumerate(decisions) if p.reason == "measure"]
    assert begins[:4] == [0, 1, 2, 3]  # two plain steps tell, the ends do not
    lengths = [decisions[n + 1][0].length for n in begins[4:]]
    assert Counter(length > 2 for length in lengths)[True] > len(lengths) / 2

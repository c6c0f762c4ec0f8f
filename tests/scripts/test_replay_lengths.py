"""Lengths replayed on texts that were taken apart.

Faults that were made by hand, and found here: the first round counts; a round takes a
token too few; a plain step that is on its way costs as much as a whole one; a
draft that reads the prompt for nothing, or twice, or what it has missed with it; tokens
at the end of a draft that ends early cost nothing, or are not told.
"""

import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from mlx_speculation import demo_models
from mlx_speculation.engine.draft_length.base import FixedDraftLength, Plan
from mlx_speculation.engine.draft_length.early_stop import Certainties, Stop
from support.drafters.scripted_draft_lengths import Planned

SCRIPTS = Path(__file__).parents[2] / "scripts"
TEXT = [2, 6, 5, 4, 3, 2, 1, 0, 3, 2, 1, 0]


@pytest.fixture(name="script")
def _script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("replay_lengths")


def replayed(script: ModuleType, lengths: list[int], text: list[int]) -> float:
    machine = script.Machine([1.0, 1.5, 2.0, 2.5, 3.0], 0.0)
    policy = FixedDraftLength(lengths[0]) if len(lengths) == 1 else Planned(lengths)
    places = [script.Place(right) for right in text]
    seconds: float = script.replayed(policy, machine, places, np.random.default_rng(0))
    return seconds


def test_rounds_take_what_is_right_and_one_more(script: ModuleType) -> None:
    # Rounds begin at 0 (2 right), 3 (4 right), 8 (room for 3): 9 tokens are counted.
    assert replayed(script, [4], TEXT) == pytest.approx((3.0 + 2.5) / 9)


def test_the_end_of_a_text_cuts_its_last_round(script: ModuleType) -> None:
    # Rounds begin at 0, 3 and 6 (one right), 8 (two of two), 11: the last is plain.
    seconds = 2.0 + 2.0 + 2.0 + 1.0
    assert replayed(script, [2], TEXT) == pytest.approx(seconds / 9)


def test_plain_steps_cost_a_step_each(script: ModuleType) -> None:
    # The first one brings the second on its way; the last one brings none.
    assert replayed(script, [0], TEXT) == pytest.approx((11 - 1 + 0.08) / 11)


def test_a_draft_behind_a_step_waits_for_what_is_left_of_it(script: ModuleType) -> None:
    machine = script.Machine([1.0, 1.5], 0.0)
    policy = Planned([0, 0, 1])
    # 0 brings a step, which is read at 1; then drafts at 2 and, after two steps, at 6.
    text = [script.Place(right) for right in (0, 0, 1, 0, 0, 0)]
    seconds = script.replayed(policy, machine, text, np.random.default_rng(0))
    assert seconds == pytest.approx((0.08 + 1.5 + 1.92 + 0.08) / 5)


def test_a_draft_reads_what_it_has_missed(script: ModuleType) -> None:
    machine = script.Machine([1.0, 1.5], 0.0, reading=0.01)
    text = [script.Place(0)] * 24
    for steps, prompt in ((4, 0), (16, script.CONTEXT + 16)):
        noted = Planned([0] * steps + [1, 0, 0, 1] + [0] * 30)
        random = np.random.default_rng(0)
        seconds = script.replayed(noted, machine, text, random) * 23
        free = script.Machine([1.0, 1.5], 0.0)
        again = Planned([0] * steps + [1, 0, 0, 1] + [0] * 30)
        less = script.replayed(again, free, text, np.random.default_rng(0)) * 23
        assert seconds - less == pytest.approx((prompt + 2) * 0.01)
        readings = [outcome.reading for _, outcome in noted.noted if outcome.reading]
        assert readings == [pytest.approx((script.CONTEXT + steps) * 0.01)]


class Early(Planned):
    """Plans drafts of 4 tokens that end where the draft is unsure."""

    def __init__(self) -> None:
        super().__init__([4])
        self.stop = Stop(0.5, Certainties())

    def plan(self, context: int, limit: int) -> Plan:
        plan = replace(super().plan(context, limit), stop=self.stop)
        return plan if plan.length else replace(plan, stop=None)


def test_a_draft_that_ends_early_is_longer_by_what_was_computed_meanwhile(
    script: ModuleType,
) -> None:
    machine = script.Machine([1.0, 1.5, 2.0, 2.5, 3.0], 0.0)
    sure, unsure = (0.97,) * 4, (0.97, 0.02, 0.97, 0.97)
    # Rounds: whole and right; ended by the second token, of which one, all three, and
    # none are right; and one whose last token is not worth its time.
    places = {0: (4, sure), 5: (1, unsure), 7: (4, unsure), 11: (0, unsure)}
    places |= {12: (3, (0.97, 0.97, 0.97, 0.02))}
    text = [script.Place(*places.get(n, (0, sure))) for n in range(18)]
    policy = Early()
    seconds = script.replayed(policy, machine, text, np.random.default_rng(0))
    told = [(o.drafted, o.accepted) for _, o in policy.noted]
    assert told[:5] == [(4, 4), (3, 1), (3, 3), (3, 0), (4, 3)]
    assert [len(o.certainties) for _, o in policy.noted[:5]] == [4, 3, 3, 3, 4]
    # The first round is not counted, and two tokens are left for one that is whole.
    last = [o for _, o in policy.noted[5:]]
    rest = sum(machine.seconds[o.drafted] for o in last)
    spent = 3 * 2.5 + 3.0 + rest
    assert seconds * 13 == pytest.approx(spent)


def test_what_is_right_ends_with_the_first_difference(script: ModuleType) -> None:
    assert script.in_common([1, 2, 3], [1, 2, 4, 5]) == 2
    assert script.in_common([1, 2, 3], [1, 2]) == 2
    assert script.in_common([1], [2, 1]) == 0


def test_lengths_by_measurement_are_compared_with_all_fixed_ones(
    script: ModuleType,
) -> None:
    machine = script.Machine([1.0 + 0.2 * n for n in range(9)], 0.05)
    found = script.compare(machine, [[script.Place(8)] * 120] * 3, seed=1)
    assert found["best"] == 8
    assert found["best_over_plain"] == pytest.approx(9 / 2.6, rel=0.1)
    assert 0.9 < found["auto_over_best"] == found["whole_over_best"] <= 1.01


def test_drafts_end_early_where_it_is_known_how_sure_they_are(
    script: ModuleType,
) -> None:
    machine = script.Machine([1.0 + 0.2 * n for n in range(9)], 0.05)
    random = np.random.default_rng(3)
    sure = np.where(random.random((120, 8)) < 0.88, 0.97, 0.2)
    right = np.cumprod(random.random((120, 8)) < sure, axis=1).sum(axis=1)
    text = [
        script.Place(int(n), tuple(row))
        for n, row in zip(right, sure.tolist(), strict=True)
    ]
    found = script.compare(machine, [text] * 3, seed=1)
    assert found["auto_over_best"] > found["whole_over_best"] + 0.05


def test_texts_are_taken_apart_with_how_sure_a_greedy_draft_is(
    script: ModuleType,
) -> None:
    arms = importlib.import_module("benchmark_arms")
    folders = demo_models()
    models = arms.Models.load(folders["dense"], folders["draft"])
    prompt = models.encode("import os\nimport sys\n")
    for temperature, shown in ((0.0, 4), (1.0, 0)):
        job = arms.Job(prompt, 6, temperature, 0)
        places = script.right_behind(models, job, 4)
        assert len(places) == 6
        for place in places:
            assert 0 <= place.right <= 4
            assert len(place.certainties) == shown
            assert all(0 < each <= 1 for each in place.certainties)

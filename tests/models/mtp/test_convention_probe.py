"""The probe of MTP heads, on trained weights and on random weights of every family."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_speculation.errors import ConventionError
from mlx_speculation.models import HiddenStates, MtpConvention
from mlx_speculation.models.checkpoints.convention import (
    MIXED_NORMS,
    NORM_NAMES,
    Norms,
)
from mlx_speculation.models.checkpoints.probe import Score
from mlx_speculation.models.checkpoints.probe_text import OwnText
from mlx_speculation.models.mtp import MtpHead, load_mtp_head
from mlx_speculation.models.mtp.convention_probe import HeadProbe, probe
from mlx_speculation.models.mtp.families import FAMILIES
from mlx_speculation.models.mtp.transforms import norms_of
from support.covering import others_slow
from support.models.mtp_checkpoints import (
    EACH_KIND,
    LAYOUTS,
    family,
    flat,
    make,
    write,
)
from support.models.trained_head import Truth, trained

ALL = ("order", "hidden", "norms", "recycled")
OTHER = {
    "hidden": {"after_norm": "before_norm", "before_norm": "after_norm"},
    "recycled": {"after_norm": "before_norm", "before_norm": "after_norm"},
    "order": {"embedding_first": "hidden_first"},
}


def wrong(convention: MtpConvention, field: str) -> MtpConvention:
    change: dict[str, Any] = {field: OTHER[field][getattr(convention, field)]}
    return replace(convention, **change)


@cache
def trial_of(truth: Truth) -> Any:
    """Return a trial of a trained head; the trial computes each score only once."""
    trial: Any = trained(truth).trial()
    trial.first, trial.second = cache(trial.first), cache(trial.second)
    return trial


def probed_convention(
    truth: Truth, usual: MtpConvention, free: Sequence[str]
) -> MtpConvention:
    return probe(trial_of(truth), usual, free, source="the test")


@pytest.mark.openblas
@pytest.mark.parametrize(
    ("truth", "field"),
    [
        ("after_norm", "order"),
        ("after_norm", "hidden"),
        ("after_norm", "recycled"),
        pytest.param("as trained", "order", marks=pytest.mark.slow),
        pytest.param("before_norm", "hidden", marks=pytest.mark.slow),
        pytest.param("before_norm", "recycled", marks=pytest.mark.slow),
    ],
)
def test_every_wrong_field_scores_lower_and_is_found(truth: Truth, field: str) -> None:
    made = trained(truth)
    right, other = made.convention, wrong(made.convention, field)
    trial = trial_of(truth)
    measure = trial.second if field == "recycled" else trial.first
    good, bad = measure(right), measure(other)
    assert good.above_chance
    assert good.surely_above(bad)
    assert good.agreement > bad.agreement + 0.1
    assert probed_convention(truth, other, ["order", "hidden", "recycled"]) == right


@pytest.mark.openblas
@pytest.mark.slow
def test_what_the_head_as_it_is_does_not_show_stays_usual() -> None:
    """A norm with weights of about one size hardly changes the next norm's result."""
    trial, right = trial_of("as trained"), trained().convention
    for field, measure in (("hidden", trial.first), ("recycled", trial.second)):
        good, other = measure(right), measure(wrong(right, field))
        assert abs(good.mean - other.mean) < 0.01
    assert probed_convention("as trained", right, ["hidden", "recycled"]) == right
    kept = wrong(right, "hidden")
    assert probed_convention("as trained", kept, ["hidden"]) == kept


TRUTHS: list[Norms] = ["plus_one", ("norm_e", "post_attention_layernorm"), "stored"]
OTHERS: list[Norms] = [*((name,) for name in MIXED_NORMS), MIXED_NORMS[:2], MIXED_NORMS]


@pytest.mark.openblas
@pytest.mark.parametrize(
    "norms", [*TRUTHS, *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)]
)
def test_the_form_of_each_norm_is_found(norms: Norms) -> None:
    made = trained()
    names = () if norms == "stored" else NORM_NAMES if norms == "plus_one" else norms
    stored = {
        name: weight - 1 if name.split(".")[-2] in names else weight
        for name, weight in made.stored.items()
    }
    trial = made.trial(stored)
    result = probe(trial, made.convention, ["norms", "order"], source="the test")
    assert result == replace(made.convention, norms=norms)
    applied = flat(made.head)
    for name, weight in made.stored.items():
        assert mx.allclose(applied[name], weight, atol=1e-5), name


class Scored:
    """A trial whose scores depend on the norms only."""

    def __init__(self, usual: float, other: float, agreement: float = 0.7) -> None:
        self._usual, self._other, self._agreement = usual, other, agreement

    def first(self, convention: MtpConvention) -> Score:
        other = convention.norms == ("norm_e",)
        mean = self._other if other else self._usual
        noise = np.tile([0.1, -0.1], 50) if other else 0.0
        return Score(np.full(100, mean) + noise, self._agreement, 0.02)

    second = first

    def assume(self, convention: MtpConvention) -> None:
        """Accept any convention."""


@pytest.mark.parametrize(
    ("trial", "norms"),
    [
        (Scored(-2.0, -1.9), ("norm_e",)),
        (Scored(-2.0, -1.96), "stored"),  # too small a gain
        (Scored(-2.0, -1.0, 0.95), "stored"),  # nothing to gain
    ],
)
def test_a_mixture_that_is_not_clearly_better_is_not_taken(
    trial: Any, norms: Norms
) -> None:
    result = probe(trial, MtpConvention(norms="stored"), ["norms"], source="the test")
    assert result.norms == norms


@pytest.mark.parametrize(
    "name", [name for name in LAYOUTS if family(LAYOUTS[name]).plus_one]
)
def test_every_norm_that_may_lack_its_one_has_a_name(name: str) -> None:
    assert {each.name for each in FAMILIES if each.plus_one} == {"Qwen", "Step-3.5"}
    _, head, *_ = random_pair(name)
    names = {each.split(".")[-2] for each in norms_of(flat(head))}
    assert names == set(NORM_NAMES)


class OneRight:
    """A trial in which only the convention `right` guesses well."""

    def __init__(self, right: MtpConvention) -> None:
        self.right, self.assumed = right, MtpConvention()

    def first(self, convention: MtpConvention) -> Score:
        right = convention == replace(self.right, recycled=convention.recycled)
        return Score(np.full(40, -1.0 if right else -7.0), 0.8 * right, 0.02)

    def second(self, convention: MtpConvention) -> Score:
        return Score(np.full(40, -1.0 if convention == self.right else -7.0), 0.5, 0.02)

    def assume(self, convention: MtpConvention) -> None:
        self.assumed = convention


@pytest.mark.parametrize("order", ["embedding_first", "hidden_first"])
@pytest.mark.parametrize("side", ["after_norm", "before_norm"])
@pytest.mark.parametrize("norms", ["stored", "plus_one", MIXED_NORMS])
def test_a_convention_that_differs_in_everything_is_found(
    order: Any, side: Any, norms: Norms
) -> None:
    """No single change scores better, so the probe has to try all combinations."""
    right = MtpConvention(side, side, order, norms)
    trial = OneRight(right)
    usual = MtpConvention(norms="stored")
    result = probe(trial, usual, ALL, source="the test")  # type: ignore[arg-type]
    assert result == trial.assumed == right


def test_the_target_and_its_caches_stay_as_they_are(tmp_path: Path) -> None:
    made = write(tmp_path, "qwen3_5_moe")
    target: Any = made.target
    caches, ids = target.make_cache(), mx.arange(9)[None]
    expected = target(ids)
    target(ids[:, :8], cache=caches)
    weights = flat(target)
    with pytest.raises(ConventionError):
        load_mtp_head(made.folder, target)
    after = target(ids[:, 8:], cache=caches)
    assert mx.allclose(after[:, -1], expected[:, -1], atol=1e-4)
    assert all(value is weights[name] for name, value in flat(target).items())


@pytest.mark.parametrize("name", others_slow(LAYOUTS, EACH_KIND))
def test_a_random_head_of_any_family_is_refused(name: str) -> None:
    _, head, usual, text, taps = random_pair(name)
    trial = HeadProbe(head, norms_of(flat(head)), taps, text)
    assert trial.first(usual).values.size > 1
    with pytest.raises(ConventionError, match=r"mtp\.safetensors does not") as error:
        probe(trial, usual, ALL, source="mtp.safetensors")
    message = str(error.value)
    for said in ("hidden after_norm", "hidden_first", "plus_one", "agrees", "chance"):
        assert said in message
    assert message.count("log-probability") >= 8


@cache
def random_pair(name: str) -> tuple[Any, MtpHead, MtpConvention, OwnText, HiddenStates]:
    _, target, head = make(name)
    usual = replace(head.convention, norms="stored")
    taps = HiddenStates(target, before_norm=True, after_norm=True)
    starts = [[7, 30, 2, 41], [5, 90, 11, 3, 8], [77, 1, 60, 12]]
    return target, head, usual, OwnText.of(target, taps, starts, 8), taps

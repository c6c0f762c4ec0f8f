"""The probe of MTP heads, on trained weights and on random weights of every family."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
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
from mlx_speculation.models.mtp import Mtp, MtpHead
from mlx_speculation.models.mtp.convention_probe import GROUPS, HeadProbe, probe
from mlx_speculation.models.mtp.families import FAMILIES
from mlx_speculation.models.mtp.load_with_convention import probe_mtp_head
from mlx_speculation.models.mtp.transforms import norms_of
from support.covering import others_slow
from support.models.mtp_checkpoints import EACH_KIND, LAYOUTS, family, flat, make
from support.models.trained_head import Truth, trained

ALL = ("order", "hidden", "norms", "recycled")
OTHER = {
    "hidden": {"after_norm": "before_norm", "before_norm": "after_norm"},
    "recycled": {"after_norm": "before_norm", "before_norm": "after_norm"},
    "order": {"embedding_first": "hidden_first"},
}


def wrong(convention: MtpConvention, field: str) -> MtpConvention:
    """Return a convention with another value of one field."""
    change: dict[str, Any] = {field: OTHER[field][getattr(convention, field)]}
    return replace(convention, **change)


@cache
def trial_of(truth: Truth) -> Any:
    """Return a probe of a trained head that keeps the scores it has computed."""
    trial: Any = trained(truth).trial()
    trial.first, trial.second = cache(trial.first), cache(trial.second)
    return trial


def probed_convention(
    truth: Truth, usual: MtpConvention, free: Sequence[str]
) -> MtpConvention:
    """Return the convention that a probe finds when it starts from `usual`."""
    return probe(trial_of(truth), usual, free, source="the test").convention


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
    """A norm whose weights are nearly equal hardly changes the next norm's result."""
    trial, right = trial_of("as trained"), trained().convention
    for field, measure in (("hidden", trial.first), ("recycled", trial.second)):
        good, other = measure(right), measure(wrong(right, field))
        assert abs(good.mean - other.mean) < 0.01
    assert probed_convention("as trained", right, ["hidden", "recycled"]) == right
    kept = wrong(right, "hidden")
    assert probed_convention("as trained", kept, ["hidden"]) == kept


MIXED: list[Any] = [
    "plus_one",
    *(
        pytest.param(norms, marks=pytest.mark.slow)
        for norms in [
            ("norm_e", "post_attention_layernorm"),
            *((name,) for name in MIXED_NORMS),
            MIXED_NORMS,
        ]
    ),
]


@pytest.mark.openblas
@pytest.mark.parametrize("norms", MIXED)
def test_norms_that_lack_their_one_are_found(norms: Norms) -> None:
    made = trained()
    stored = lacking(norms)
    result = probe(
        made.trial(stored),
        made.convention,
        ["norms", "order"],
        source="the test",
        on_passage=None
        if norms == "plus_one"
        else lambda: made.trial(stored, passage=True),
    )
    assert result.convention == replace(made.convention, norms=norms)
    right = result.first[result.convention]
    for norms_of_other in ("stored", "plus_one"):
        other = replace(made.convention, norms=norms_of_other)
        if other != result.convention:
            assert right.surely_above(result.first[other])
    applied = flat(made.head)
    for name, weight in made.stored.items():
        assert mx.allclose(applied[name], weight, atol=1e-5), name


def lacking(norms: Norms) -> Any:
    """Return the norms of the trained head in the form that `norms` describes."""
    names = () if norms == "stored" else NORM_NAMES if norms == "plus_one" else norms
    return {
        name: weight - 1 if name.split(".")[-2] in names else weight
        for name, weight in trained().stored.items()
    }


def but(*names: str) -> tuple[str, ...]:
    """Return the names of all norms of a head except the given ones."""
    return tuple(name for name in NORM_NAMES if name not in names)


SLOW = pytest.mark.slow
MIXTURES: list[Any] = [
    ("plus_one", but("q_norm", "k_norm")),
    pytest.param("plus_one", but("norm_e", "norm_h", "final"), marks=SLOW),
    pytest.param("stored", ("final",), marks=SLOW),
    pytest.param("plus_one", but("final"), marks=SLOW),
    *(pytest.param("plus_one", but(*group), marks=SLOW) for group in GROUPS[:4]),
    *(pytest.param("stored", group, marks=SLOW) for group in GROUPS[:-1]),
    pytest.param("stored", ("norm_e", "norm_h", "final"), marks=SLOW),
    pytest.param("plus_one", but("q_norm", "k_norm", "final"), marks=SLOW),
]


@pytest.mark.openblas
@pytest.mark.parametrize(("said", "truth"), MIXTURES)
def test_norms_that_are_not_all_stored_as_the_files_say_are_found(
    said: Norms, truth: Norms
) -> None:
    made, stored, reads = trained(), lacking(truth), []

    def on_passage() -> Any:
        trial: Any = made.trial(stored, passage=True)
        first = trial.first

        def counted(convention: MtpConvention) -> Score:
            reads.append(convention)
            score: Score = first(convention)
            return score

        trial.first = counted
        return trial

    usual = replace(made.convention, norms=said)
    result = probe(
        made.trial(stored),
        usual,
        [],
        source="the test",
        on_passage=on_passage,
    )
    assert result.convention == replace(made.convention, norms=truth)
    applied = flat(made.head)
    for name, weight in made.stored.items():
        assert mx.allclose(applied[name], weight, atol=1e-5), name
    assert len(reads) <= 1 + len(GROUPS) * len(GROUPS)


@pytest.mark.openblas
@pytest.mark.parametrize(
    ("norms", "free"),
    [
        ("plus_one", []),
        pytest.param("stored", [], marks=SLOW),
        pytest.param("plus_one", ["norms"], marks=SLOW),
        pytest.param("stored", ["norms"], marks=SLOW),
    ],
)
def test_norms_that_are_all_stored_alike_are_found_to_be(
    norms: Norms, free: list[str]
) -> None:
    made, stored = trained(), lacking(norms)
    usual = replace(made.convention, norms=norms)
    result = probe(
        made.trial(stored),
        usual,
        free,
        source="the test",
        on_passage=lambda: made.trial(stored, passage=True),
    )
    assert result.convention == usual


class Scored:
    """A trial whose scores depend on the norms only."""

    norms = frozenset(NORM_NAMES)

    def __init__(self, usual: float, other: float, agreement: float = 0.7) -> None:
        self._usual, self._other, self._agreement = usual, other, agreement

    def first(self, convention: MtpConvention) -> Score:
        mean = self._other if convention.norms == ("final",) else self._usual
        noise = np.tile([0.1, -0.1], 50) if convention.norms == ("final",) else 0.0
        return Score(np.full(100, mean) + noise, self._agreement, 0.02)

    second = first

    def assume(self, convention: MtpConvention) -> None:
        """Accept any convention."""


@pytest.mark.parametrize(
    ("text", "passage", "norms"),
    [
        (Scored(-2.0, -2.0), Scored(-2.0, -1.9), ("final",)),
        (Scored(-2.0, -2.0), Scored(-2.0, -1.96), "stored"),  # too small a gain
        (Scored(-2.0, -2.2), Scored(-2.0, -1.5), "stored"),  # text and passage disagree
        (Scored(-2.0, -1.0, 0.95), None, "stored"),  # nothing to gain
    ],
)
def test_a_mixture_that_is_not_clearly_better_is_not_taken(
    text: Any, passage: Any, norms: Norms
) -> None:
    def on_passage() -> Any:
        assert passage is not None, "a passage was read"
        return passage

    usual = MtpConvention(norms="stored")
    result = probe(text, usual, [], source="the test", on_passage=on_passage)
    assert result.convention.norms == norms


@pytest.mark.parametrize(
    "name", [name for name in LAYOUTS if family(LAYOUTS[name]).plus_one]
)
def test_every_norm_that_may_lack_its_one_has_a_name(name: str) -> None:
    assert {each.name for each in FAMILIES if each.plus_one} == {"Qwen", "Step-3.5"}
    _, head, *_ = random_pair(name)
    names = {each.split(".")[-2] for each in norms_of(flat(head))}
    assert names == set(NORM_NAMES)
    assert {each for group in GROUPS for each in group} == set(NORM_NAMES)


@pytest.mark.openblas
@pytest.mark.slow
def test_the_head_of_another_model_is_refused() -> None:
    made = trained()
    weights = flat(made.head)
    proj = "layers.0.proj.weight"
    try:
        made.head.load_weights([(proj, mx.roll(weights[proj], 7, 0))], strict=False)
        with pytest.raises(ConventionError) as error:
            probe(made.trial(), made.convention, ALL, source="mtp.safetensors")
    finally:
        made.head.load_weights([(proj, weights[proj])], strict=False)
    check_refusal(str(error.value))


def check_refusal(message: str) -> None:
    """Check that a refusal lists the tried conventions with their scores."""
    assert "in mtp.safetensors guesses" in message
    for said in ("hidden after_norm", "hidden_first", "plus_one", "agrees", "chance"):
        assert said in message
    assert message.count("log-probability") >= 8


class OneRight:
    """A trial in which only the convention `right` guesses well."""

    norms = frozenset(NORM_NAMES)

    def __init__(self, right: MtpConvention) -> None:
        self.right, self.assumed = right, MtpConvention()

    def first(self, convention: MtpConvention) -> Score:
        right = convention == replace(self.right, recycled=convention.recycled)
        return Score(np.full(40, -1.0 if right else -7.0), 0.8 * right, 0.02)

    def second(self, convention: MtpConvention) -> Score:
        return Score(np.full(40, -1.0 if convention == self.right else -7.0), 0.5, 0.02)

    def assume(self, convention: MtpConvention) -> None:
        self.assumed = convention


class NoneRight(OneRight):
    """A trial in which no convention guesses well."""

    def first(self, convention: MtpConvention) -> Score:
        return Score(np.full(40, -7.0), 0.0, 0.02)


def test_a_head_that_drafts_nothing_right_is_refused_with_its_scores() -> None:
    usual = MtpConvention(norms="stored")
    trial: Any = NoneRight(usual)
    with pytest.raises(ConventionError) as error:
        probe(trial, usual, ALL, source="mtp.safetensors")
    check_refusal(str(error.value))


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
    assert result.convention == trial.assumed == right


def test_the_target_and_its_caches_stay_as_they_are() -> None:
    target, head, usual, text, _ = random_pair("qwen3_5_moe")
    caches = target.make_cache()
    ids = text.tokens[:1, :9]
    expected = target(ids)
    target(ids[:, :8], cache=caches)
    weights = flat(target)
    starts = [[5, 6, 7], [8, 9, 10, 11]]
    with pytest.raises(ConventionError):
        probe_mtp_head(head, {}, target, starts, usual, [], source="the test")
    after = target(ids[:, 8:], cache=caches)
    assert mx.allclose(after[:, -1], expected[:, -1], atol=1e-4)
    assert all(value is weights[name] for name, value in flat(target).items())


@pytest.mark.parametrize("name", others_slow(LAYOUTS, EACH_KIND))
def test_the_second_draft_is_that_of_a_head_that_starts_over(name: str) -> None:
    """Each expected guess is computed anew, in caches of its own."""
    _, head, usual, text, taps = random_pair(name)
    trial = HeadProbe(head, norms_of(flat(head)), taps, text)
    mtp = Mtp(head, taps)
    hidden = text.after_norm if usual.hidden == "after_norm" else text.before_norm
    for convention in (usual, wrong(usual, "recycled")):
        first = max(text.written, 3)
        if head.chained:
            logits = trial._chain(convention)[:, first - 3 :]
        else:
            logits = trial._again(convention, first, first + 3)
        for i in (0, 2):
            slot = first + i - 3
            caches = head.new_caches()
            known = hidden[:, : slot + 1], text.tokens[:, 1 : slot + 2]
            out = mtp.rows(*known, caches[0])
            if head.chained:
                tokens = text.tokens[:, 2 : slot + 3]
                out = mtp.rows(out.recycled, tokens, caches[1], layer=1)
            else:
                token = text.tokens[:, slot + 2 : slot + 3]
                out = mtp.rows(out.recycled[:, -1:], token, caches[0])
            assert mx.allclose(logits[:, i], out.logits[:, -1], atol=2e-4)


@pytest.mark.parametrize("name", others_slow(LAYOUTS, EACH_KIND))
def test_a_random_head_of_any_family_is_refused(name: str) -> None:
    _, head, usual, text, taps = random_pair(name)
    trial = HeadProbe(head, norms_of(flat(head)), taps, text)
    assert trial.first(usual).values.size > 1
    with pytest.raises(ConventionError, match="by no convention"):
        probe(trial, usual, ALL, source="the test")


@cache
def random_pair(name: str) -> tuple[Any, MtpHead, MtpConvention, OwnText, HiddenStates]:
    """Return a random target with its head, usual convention, text and taps."""
    _, target, bare = make(name)
    kind = family(LAYOUTS[name])
    usual = replace(kind.convention, norms="stored")
    chained = kind.layers == "chained"
    head = MtpHead(bare.layers, usual, chained=chained, depth=kind.depth)
    taps = HiddenStates(target, before_norm=True, after_norm=True)
    starts = [[7, 30, 2, 41], [5, 90, 11, 3, 8], [77, 1, 60, 12]]
    return target, head, usual, OwnText.of(target, taps, starts, 8), taps

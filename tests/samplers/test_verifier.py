"""A request's decisions are the same in one verify and row by row, for any draft."""

from typing import Any, get_args

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_speculation.samplers import Acceptance, Chooser, Rows, Sampling, Verifier
from mlx_speculation.samplers import verifier as verifier_module
from mlx_speculation.samplers.acceptance import Verified
from mlx_speculation.samplers.noise.round_keys import round_keys

WIDTH = 12
KNOWN = [3, 1, 4, 1, 5]

OPTIONS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7, 1.3]),
        "top_k": st.sampled_from([0, 4]),
        "top_p": st.sampled_from([0.0, 0.8]),
        "draft_temperature": st.sampled_from([None, 0.0, 0.5, 2.0]),
        "repetition_penalty": st.sampled_from([None, 1.4]),
        "seed": st.integers(0, 2**64 - 1),
    }
)
RULES = st.sampled_from(get_args(Acceptance))


def logits_of(key: int, rows: int, width: int = WIDTH) -> mx.array:
    return 2 * mx.random.normal((rows, width), key=mx.random.key(key))


def verifier_of(options: dict[str, Any], acceptance: Acceptance) -> Verifier:
    return Verifier(Chooser(Sampling(**options), WIDTH), acceptance)


def drafted_by(
    verifier: Verifier, key: int, k: int
) -> tuple[mx.array, mx.array | None, list[int]]:
    """Draft k tokens; return them, their distributions, and the tokens as a list."""
    tokens: list[mx.array] = []
    distributions: list[mx.array] = []
    for index in range(k):
        ahead = mx.concatenate(tokens) if tokens else None
        chosen = verifier.propose(logits_of(key + index, 1), Rows(KNOWN, ahead))
        tokens.append(chosen.tokens)
        distributions += [] if chosen.probs is None else [chosen.probs]
    drafted = mx.concatenate(tokens)
    listed: Any = drafted.tolist()
    return drafted, mx.concatenate(distributions) if distributions else None, listed


def emitted(verified: Verified) -> list[int]:
    count: Any = 0 if verified.accepted is None else verified.accepted.item()
    tokens: Any = verified.tokens.tolist()
    return list(tokens[: count + 1])


def sequential(
    verifier: Verifier, logits: mx.array, rows: Rows, *draft: mx.array | None
) -> list[int]:
    """Verify row by row up to the first rejection, or to the last row."""
    tokens: list[int] = []
    for verified in verifier.sequential(logits, rows, *draft):
        tokens.append(verified.tokens.item())  # type: ignore[arg-type]
        if verified.accepted is not None and not verified.accepted.item():
            break
    return tokens


@given(options=OPTIONS, acceptance=RULES, key=st.integers(0, 999), k=st.integers(1, 4))
def test_a_draw_is_repeated_and_its_distribution_is_named(
    options: dict[str, Any], acceptance: Acceptance, key: int, k: int
) -> None:
    verifier = verifier_of(options, acceptance)
    drafted, distributions, tokens = drafted_by(verifier, key, k)
    assert tokens == drafted_by(verifier_of(options, acceptance), key, k)[2]
    chance = options["temperature"] > 0 and options["draft_temperature"] != 0
    assert (distributions is not None) == (chance and acceptance != "keyed")
    if distributions is not None:
        assert distributions.shape == (k, WIDTH)
        assert mx.allclose(distributions.sum(axis=-1), mx.ones(k)).item()
        drawn = mx.take_along_axis(
            distributions, drafted[:, None].astype(mx.int32), axis=-1
        )
        assert (drawn > 0).all().item()
        if options["top_k"]:
            assert ((distributions > 0).sum(axis=-1) <= options["top_k"]).all().item()


@given(
    options=OPTIONS,
    acceptance=st.sampled_from(["keyed", "rejection"]),
    key=st.integers(0, 999),
    k=st.integers(0, 4),
)
def test_rows_one_by_one_decide_as_rows_at_once(
    options: dict[str, Any], acceptance: Acceptance, key: int, k: int
) -> None:
    verifier = verifier_of(options, acceptance)
    draft: tuple[mx.array | None, mx.array | None] = (None, None)
    if k:
        drafted, distributions, _ = drafted_by(verifier, key, k)
        draft = (drafted, distributions)
    rows = Rows(KNOWN, draft[0], k + 1)
    logits = logits_of(key + 1, k + 1)  # not the draft's: few are accepted
    together = emitted(verifier.verify(logits, rows, *draft))
    assert sequential(verifier, logits, rows, *draft) == together


@given(options=OPTIONS, key=st.integers(0, 999), k=st.integers(1, 4))
def test_keyed_tokens_do_not_depend_on_the_draft(
    options: dict[str, Any], key: int, k: int
) -> None:
    verifier, text = verifier_of(options, "keyed"), list(KNOWN)
    for index in range(k):  # what one-row steps choose
        step = verifier.verify(logits_of(key + index, 1), Rows(list(text)))
        text += emitted(step)
    logits = mx.concatenate([logits_of(key + index, 1) for index in range(k)])
    right = mx.array(text[len(KNOWN) : -1], dtype=mx.uint32)
    if k > 1:
        rows = Rows(KNOWN, right, k)
        assert emitted(verifier.verify(logits, rows, right)) == text[len(KNOWN) :]


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_rounds_that_begin_elsewhere_draw_anew(acceptance: Acceptance) -> None:
    options = {"temperature": 1.0, "seed": 7}
    flat = mx.zeros((1, WIDTH))
    chosen = []
    for start in range(5):
        verifier = verifier_of(options, acceptance)
        ahead = mx.zeros((5 - start,), mx.uint32) if start < 5 else None
        rows = Rows([0] * start, ahead)
        chosen.append(verifier.propose(flat, rows).tokens.item())
        assert rows.positions == range(5, 6)
    assert len(set(chosen)) > 2


@given(
    options=OPTIONS,
    acceptance=RULES,
    key=st.integers(0, 999),
    ids=st.lists(st.integers(0, WIDTH - 1), min_size=1, unique=True),
    beyond=st.lists(st.integers(WIDTH, 90_000_000), max_size=3, unique=True),
)
def test_a_restricted_vocabulary_chooses_as_the_whole_one_without_the_rest(
    options: dict[str, Any],
    acceptance: Acceptance,
    key: int,
    ids: list[int],
    beyond: list[int],
) -> None:
    """Ids that the target lacks are left out of the choice."""
    verifier, rows = verifier_of(options, acceptance), Rows(KNOWN)
    few = logits_of(key, 1, len(ids) + len(beyond))
    whole = np.full((1, WIDTH), -np.inf, dtype=np.float32)
    whole[0, ids] = np.array(few)[0, len(beyond) :]
    every = mx.array([*beyond, *ids], dtype=mx.uint32)
    given_ids = verifier.propose(few, rows, every)
    expected = verifier.propose(mx.array(whole), rows)
    assert given_ids.tokens.item() == expected.tokens.item() in ids
    if expected.probs is not None:
        assert given_ids.probs is not None
        assert mx.array_equal(given_ids.probs, expected.probs).item()


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_a_rejected_draft_is_not_emitted(acceptance: Acceptance) -> None:
    """The draft's distribution and the target's have no token in common."""
    draft_distribution = mx.zeros((3, WIDTH)).at[:, 2].add(1.0)
    logits = mx.full((4, WIDTH), -30.0).at[:, 7].add(60.0)
    verifier = verifier_of({"temperature": 1.0, "seed": 5}, acceptance)
    drafted = mx.array([2, 2, 2], mx.uint32)
    verified = verifier.verify(
        logits, Rows(KNOWN, drafted, 4), drafted, draft_distribution
    )
    assert emitted(verified) == [7]


@given(data=st.data(), count=st.integers(1, 6))
def test_some_rows_are_those_rows(data: st.DataObject, count: int) -> None:
    ahead = mx.array(list(range(20, 20 + count)), mx.uint32)
    allowed = mx.random.uniform(shape=(count, WIDTH), key=mx.random.key(count)) > 0.5
    rows = Rows(KNOWN, ahead, count, 3, allowed)
    index = data.draw(st.integers(0, count - 1))
    some = data.draw(st.integers(1, count - index))
    part = rows.some(index, some)
    assert part.count == some
    assert part.positions == rows.positions[index : index + some]
    assert part.allowed is not None
    assert mx.array_equal(part.allowed, allowed[index : index + some])
    widest = max(part.lengths)
    whole = [*KNOWN, *ahead.tolist()]  # type: ignore[misc]
    kept: Any = [] if part.ahead is None else part.ahead.tolist()
    assert [*part.known, *kept] == whole[:widest]


def test_the_drafts_temperature_changes_its_distribution_and_no_keyed_token() -> None:
    logits, rows = logits_of(5, 1), Rows(KNOWN)
    distributions, texts = [], set()
    for temperature in (None, 0.5, 3.0):
        options = {"temperature": 1.0, "draft_temperature": temperature, "seed": 3}
        distribution = verifier_of(options, "rejection").propose(logits, rows).probs
        assert distribution is not None
        distributions.append(float(np.array(distribution).max()))
        keyed = verifier_of(options, "keyed").verify(logits, rows)
        texts.add(keyed.tokens.item())
    assert distributions[2] < distributions[0] < distributions[1]
    assert len(texts) == 1


@given(options=OPTIONS, key=st.integers(0, 999), top=st.integers(0, WIDTH + 2))
def test_log_probabilities_are_those_of_the_processed_logits(
    options: dict[str, Any], key: int, top: int
) -> None:
    verifier = verifier_of(options, "keyed")
    logits, rows = logits_of(key, 3), Rows(KNOWN, mx.array([2, 7], mx.uint32), 3)
    drafted = mx.array([2, 7], mx.uint32)
    report = verifier.verify(logits, rows, drafted, top=top).log_probs
    assert report is not None
    processed = np.array(verifier.chooser.processed(logits, rows), dtype=np.float64)
    expected = processed - np.log(np.exp(processed).sum(axis=-1, keepdims=True))
    tokens = np.array(verifier.verify(logits, rows, drafted).tokens)
    chosen = np.take_along_axis(expected, tokens[:, None].astype(int), axis=-1)
    np.testing.assert_allclose(np.array(report.tokens), chosen[:, 0], atol=1e-5)
    order = np.sort(expected, axis=-1)[:, ::-1][:, : min(top, WIDTH)]
    np.testing.assert_allclose(np.array(report.top), order, atol=1e-5)
    ids = np.array(report.top_ids).astype(int)
    assert [len(set(row)) for row in ids.tolist()] == [min(top, WIDTH)] * 3
    named = np.take_along_axis(expected, ids, axis=-1)
    np.testing.assert_allclose(named, order, atol=1e-5)


@given(
    options=OPTIONS,
    acceptance=RULES,
    key=st.integers(0, 999),
    top=st.integers(1, WIDTH + 2),
    levels=st.sampled_from([0.0, 0.5, 1.0]),
    dtype=st.sampled_from([mx.float32, mx.bfloat16]),
)
def test_the_chosen_token_goes_first_among_equals(
    options: dict[str, Any],
    acceptance: Acceptance,
    key: int,
    top: int,
    levels: float,
    dtype: mx.Dtype,
) -> None:
    """Logits times `levels` are rounded, so many are equal; some cannot be chosen."""
    verifier = verifier_of(options, acceptance)
    logits, drafted = mx.round(levels * logits_of(key, 3)), mx.array([2, 7], mx.uint32)
    logits[:, 9:] = -mx.inf
    logits = logits.astype(dtype)
    probs = mx.ones((2, WIDTH)) / WIDTH
    rows = Rows(KNOWN, drafted, 3)
    verified = verifier.verify(logits, rows, drafted, probs, top=top)
    report = verified.log_probs
    assert report is not None
    arrays = (verified.tokens, report.tokens, report.top_ids, report.top)
    for chosen, value, ids, values in zip(*(a.tolist() for a in arrays), strict=True):
        assert len(set(ids)) == len(ids) == min(top, WIDTH)
        assert values == sorted(values, reverse=True)
        above = sum(other > value for other in values)
        assert ids[above : above + 1] == [chosen][: len(ids) - above]


@pytest.mark.parametrize("acceptance", get_args(Acceptance))
def test_nothing_is_evaluated(
    acceptance: Acceptance, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier = verifier_of({"temperature": 0.9, "top_p": 0.7, "seed": 2}, acceptance)
    poison = mx.zeros((4, WIDTH)) / 0
    drafted, probs, _ = drafted_by(verifier, 3, 3)

    def waits(*_: Any) -> None:
        raise AssertionError("something was evaluated")

    for name in ("eval", "async_eval", "synchronize"):
        monkeypatch.setattr(mx, name, waits)
    verified = verifier.verify(poison, Rows(KNOWN, drafted, 4), drafted, probs, top=2)
    assert len(verified.arrays) == 6


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_every_draw_of_a_round_has_a_key_of_its_own(
    acceptance: Acceptance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise shared between draft, coins and correction would bias the text."""
    keys: list[tuple[int, ...]] = []

    def noted(*arguments: mx.array) -> mx.array:
        made = round_keys(*arguments)
        keys.extend(tuple(row) for row in np.array(made).tolist())
        return made

    monkeypatch.setattr(verifier_module, "round_keys", noted)
    verifier = verifier_of({"temperature": 1.0, "seed": 2}, acceptance)
    drafted, probs, _ = drafted_by(verifier, 3, 3)
    verifier.verify(logits_of(1, 4), Rows(KNOWN, drafted, 4), drafted, probs)
    assert len(keys) == len(set(keys)) == 3 + 3 + 1


@pytest.mark.parametrize(
    ("acceptance", "options", "tolerates_invalid_logits"),
    [
        ("keyed", {"seed": 1}, True),
        ("keyed", {"temperature": 0.7, "seed": 1}, True),
        ("keyed", {"temperature": 0.7, "seed": 1, "repetition_penalty": 1.4}, False),
        ("rejection", {"temperature": 0.7, "seed": 1}, False),
        ("block", {"seed": 1}, True),
    ],
)
def test_unusable_proposals_harm_where_something_is_kept_of_them(
    acceptance: Acceptance, options: dict[str, Any], tolerates_invalid_logits: bool
) -> None:
    assert (
        verifier_of(options, acceptance).tolerates_invalid_logits
        == tolerates_invalid_logits
    )


def test_decisions_have_a_fixed_shape_where_rows_are_named() -> None:
    chooser = Chooser(Sampling(temperature=0.7, seed=1), WIDTH)
    assert Verifier(chooser).chooser is chooser
    fixed = Verifier(chooser, rows=8).chooser
    assert fixed.filled_up(logits_of(1, 1)).shape == (8, WIDTH)

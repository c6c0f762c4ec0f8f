"""`calibrate_batches` measures the costs of rounds before any request."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_speculation import (
    BatchGenerator,
    InvalidRequestError,
    NonFiniteLogitsError,
    SpeculativeGenerator,
)
from mlx_speculation.engine.batch.running import RunningTogether
from mlx_speculation.engine.draft_length import calibration
from mlx_speculation.engine.draft_length.rule import DraftRule
from mlx_speculation.engine.stream_factory import StreamFactory
from support.covering import others_slow
from support.drafters.batch_heads import head_bench
from support.drafters.batches import bench
from support.drafters.scripted_draft_lengths import CALIBRATED
from support.identity import prompt_of
from support.models import census
from support.models.tiny_tokenizer import byte_tokenizer

pytestmark = pytest.mark.usefixtures("measured")


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide saved costs, and measure once instead of three times."""
    monkeypatch.setenv("MLX_SPECULATION_CACHE", str(tmp_path))
    monkeypatch.setattr(calibration, "PASSES", 1)


@pytest.fixture(name="rounds")
def _rounds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    row_counts: list[int] = []
    usual = RunningTogether.next_round

    def counted(self: RunningTogether, **options: Any) -> None:
        row_counts.append(len(self.rows))
        usual(self, **options)

    monkeypatch.setattr(RunningTogether, "next_round", counted)
    return row_counts


def generator_with(kind: str) -> SpeculativeGenerator:
    made = head_bench("llama") if kind == "random" else bench("llama")
    return made.generator(kind, draft_length=None)


@pytest.mark.parametrize("kind", others_slow(["model", "lookup", "random"], ["model"]))
def test_every_length_is_measured_for_each_number_of_rows(
    kind: str, rounds: list[int]
) -> None:
    reported: list[tuple[int, int]] = []
    tables = generator_with(kind).calibrate_batches(
        [4, 2], contexts=[8], progress=lambda *done: reported.append(done)
    )
    assert list(tables) == [2, 4]
    for table in tables.values():
        assert set(table) == {0}
        assert list(table[0]) == CALIBRATED
        assert all(seconds > 0 for seconds in table[0].values())
    assert tables[2] != tables[4]
    assert {n: rounds.count(n) for n in (2, 4)} == {2: len(rounds) // 2} | {
        4: len(rounds) // 2
    }
    assert len(rounds) == 2 * 24
    half = len(reported) // 2
    assert reported[:half] == reported[half:] == sorted(reported[:half])
    assert {total for _, total in reported} == {24}
    assert 0.8 < reported[-1][0] / reported[-1][1] <= 1


def test_what_was_measured_is_kept_for_batches_of_so_many_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = generator_with("model").calibrate_batches([4])[4]
    other = generator_with("model")
    assert other.lengths.batch_sources(4)[0].costs.table() == table
    reasons: list[str] = []
    choose = DraftRule.choose

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        plan = choose(self, *args, **options)
        reasons.append(plan.reason)
        return plan

    monkeypatch.setattr(DraftRule, "choose", noted)
    with BatchGenerator(other, row_sizes=False) as batch:
        for _ in range(4):
            batch.insert(prompt_of(6), max_tokens=20, stop_tokens=())
        while batch.waiting or batch.running:
            batch.next()
    assert len(reasons) > 1
    # The reason is "measure" until two rounds have been `Feedback.steady`: the second
    # and the third. The fourth measures too, since it is planned before the third ends.
    assert reasons.count("measure") == 4


def test_the_costs_of_a_single_text_are_left_as_they_are() -> None:
    generator = generator_with("model")
    generator.calibrate_batches([2])
    assert generator.round_parts == {}
    again = generator_with("model")
    again.calibrate([8])
    assert sorted(again.lengths.batch_sources(2)[0].costs.table()[0]) == CALIBRATED


def test_a_batch_chooses_among_the_lengths_that_are_measured() -> None:
    rule = generator_with("model").lengths.for_batch().rule
    rule.sources[0].costs.take({0: {n: 1 + 0.01 * n for n in CALIBRATED}})
    offered = [[[0.9] * 16]]
    rule.choose(8, 50, offered)  # a plain step, for a quick first token
    plan = rule.choose(8, 50, offered)
    assert [option.length for option in plan.compared[0].options] == CALIBRATED[1:]


def test_an_error_ends_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[Any] = []
    usual = StreamFactory.make

    def make(self: StreamFactory, prompt: Any, options: Any) -> Any:
        streams.append(usual(self, prompt, options))
        return streams[-1]

    def interrupted(self: RunningTogether, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(StreamFactory, "make", make)
    monkeypatch.setattr(RunningTogether, "next_round", interrupted)
    generator = generator_with("model")
    with pytest.raises(KeyboardInterrupt):
        generator.calibrate_batches([3])
    assert [stream.ended for stream in streams] == [True] * 3
    assert generator.lengths.batch_sources(3)[0].costs.table() == {}


def test_a_row_that_fails_ends_it_and_nothing_is_kept() -> None:
    made = bench("llama")
    kind, broken = type(made.model), [0]

    class Breaking(kind):  # type: ignore[misc,valid-type]
        """A model whose second row is NaN after five forwards of three rows."""

        def __call__(self, inputs: Any, **options: Any) -> Any:
            logits = super().__call__(inputs, **options)
            broken[0] += inputs.shape[0] == 3
            bad = (mx.arange(inputs.shape[0]) == 1)[:, None, None]
            return mx.where(bad & (broken[0] > 5), mx.nan, logits)

    Breaking.__module__ = kind.__module__
    generator = generator_with("lookup")
    try:
        made.model.__class__ = Breaking
        with pytest.raises(NonFiniteLogitsError):
            generator.calibrate_batches([3])
    finally:
        made.model.__class__ = kind
    assert generator.lengths.batch_sources(3)[0].costs.table() == {}


@pytest.mark.parametrize("rows", [[], [2, 0]])
def test_numbers_of_rows_are_at_least_one(rows: list[int]) -> None:
    with pytest.raises(InvalidRequestError, match="rows is"):
        generator_with("model").calibrate_batches(rows, contexts=[8])


def test_rows_that_run_alone_are_refused() -> None:
    model = census.build("gemma2")
    generator = SpeculativeGenerator(model, byte_tokenizer(), draft="lookup")
    with pytest.raises(InvalidRequestError, match="run alone"):
        generator.calibrate_batches([2])

"""A calibration measures how many layers a forward should submit at once."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_speculation import SpeculativeGenerator
from mlx_speculation.engine import calibrate
from mlx_speculation.engine.calibrate import PART_ROUNDS, measure_part
from mlx_speculation.models import PART_SIZES, usual_part
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer


class Rounds:
    """A stream and its clock; a round takes the seconds of its part size."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.seconds, self.run, self.now = seconds, list[int](), 0.0
        self.request: Any = SimpleNamespace(target=SimpleNamespace(part=usual_part()))

    def next_round(self) -> list[Any]:
        self.run.append(self.request.target.part)
        self.now += self.seconds[self.run[-1]]
        return []

    def __enter__(self) -> "Rounds":
        return self

    def __exit__(self, *error: object) -> None: ...


@pytest.mark.parametrize(
    ("times", "best"),
    [
        ({8: 5.0}, 8),
        ({8: 9.7, 2: 9.9}, usual_part()),  # gains below a twentieth
        ({16: 4.0, 2: 5.0}, 16),
    ],
    ids=["a clear gain", "noise", "the larger gain"],
)
def test_the_fastest_size_is_taken_where_it_gains(
    times: dict[int, float], best: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = Rounds(dict.fromkeys(PART_SIZES, 10.0) | times)
    monkeypatch.setattr(calibrate, "perf_counter", lambda: rounds.now)
    stream: Any = rounds
    assert measure_part(lambda prompt, lengths: stream, 64) == best
    assert rounds.run[1:] == [*PART_SIZES] * PART_ROUNDS  # by turns


def test_a_calibration_measures_it_once_for_streams_and_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_SPECULATION_CACHE", str(tmp_path))
    model, draft = build("llama"), build("llama", seed=1)

    def made() -> SpeculativeGenerator:
        return SpeculativeGenerator(model, byte_tokenizer(), draft=draft)

    assert made().lengths.part == usual_part()
    generator = made()
    generator.calibrate()
    generator.lengths.calibrated().part = 4  # whatever was measured
    generator.calibrate_batches([1])
    stream = generator.stream("a")
    assert stream.request.target.part == 4
    stream.close()

"""Default number of prompt tokens that are read at once."""

import mlx.core as mx
import pytest

from mlx_speculation import SpeculativeGenerator
from mlx_speculation.models import PREFILL_STEP, usual_prefill_step
from support.identity import prompt_of
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer


def test_a_cpu_reads_little_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    assert usual_prefill_step() == PREFILL_STEP
    monkeypatch.setattr(mx, "default_device", lambda: mx.cpu)
    assert usual_prefill_step() == 256


def test_chunks_are_those_of_the_device_or_as_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = SpeculativeGenerator(build("llama"), byte_tokenizer(), draft="lookup")

    def chunks(size: int | None) -> list[int]:
        read: list[int] = []
        generator.generate(
            prompt_of(600),
            prefill_step_size=size,
            max_tokens=1,
            prompt_progress=read.append,
        )
        assert sum(read) == 599  # the first round reads the last
        return read

    assert chunks(100) == [100] * 5 + [99]
    assert chunks(None) == ([256, 256, 87] if mx.default_device() == mx.cpu else [599])

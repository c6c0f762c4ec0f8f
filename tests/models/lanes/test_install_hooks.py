"""Texts stay the same without the operations in models/cpu or models/cuda.

These folders are called rooms. The CPU room runs on any machine in these tests.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import mlx.core as mx
import pytest

from mlx_speculation import SpeculativeGenerator
from mlx_speculation.errors import UnsupportedModelError
from mlx_speculation.models import compiled_steps, cpu, cuda, round_context
from mlx_speculation.models.cpu import registration
from mlx_speculation.models.ops import dispatch
from support.covering import covering
from support.identity import GREEDY, check_identity, prompt_of
from support.models.census import build
from support.models.tiny_tokenizer import byte_tokenizer

NAMES = ["llama", "qwen3_5", "gemma3_text", "deepseek_v3", "mamba"]
OUT = {"cpu": [cpu], "cuda": [cuda], "both": [cpu, cuda], "none": []}


def home(room: Any) -> str:
    return Path(room.__file__).resolve().parent.as_posix()


@pytest.fixture(name="entered")
def _entered(
    out: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, set[str]]]:
    """Leave out the rooms of `OUT[out]`; return the functions that each room ran."""
    homes = {home(room): room.__name__ for room in (cpu, cuda)}
    entered: dict[str, set[str]] = {name: set() for name in homes.values()}
    folders: dict[str, str | None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if path not in folders:
            folders[path] = homes.get(Path(path).resolve().parent.as_posix())
        room = folders[path]
        if event == "call" and room is not None:
            entered[room].add(frame.f_code.co_name)

    for module in (round_context, registration):
        monkeypatch.setattr(module, "x86_serves", lambda: True)
    device = mx.default_device()
    rooms = [room for room in (cuda, cpu) if room not in OUT[out]]
    monkeypatch.setattr(dispatch, "ROOMS", [room.OPS for room in rooms])
    sys.setprofile(note)
    yield entered
    sys.setprofile(None)
    mx.set_default_device(device)


@pytest.mark.parametrize(("name", "out"), covering(NAMES, OUT))
def test_texts_are_those_of_plain_decoding(
    name: str, out: str, entered: dict[str, set[str]]
) -> None:
    seen = check_identity(
        build(name),
        prompt_of(40),
        draft_length=5,
        tokens=24,
        bitwise=False,  # the CPU room rounds differently
        kinds=["turning"],
        samplings=[GREEDY],
    )
    assert seen.texts == 1
    for room in OUT[out]:
        assert entered[room.__name__] == set()
    if cpu not in OUT[out] and name not in ("deepseek_v3", "mamba"):
        assert "attend" in entered[cpu.__name__]


@pytest.mark.parametrize("out", ["cpu", "both"])
@pytest.mark.usefixtures("entered")
def test_without_the_cpu_room_no_draft_is_compiled() -> None:
    with pytest.raises(UnsupportedModelError, match="Leave compile_draft out"):
        compiled_steps(build("llama"))
    model = build("llama")
    with pytest.raises(UnsupportedModelError, match="compile_draft is True"):
        SpeculativeGenerator(
            model, byte_tokenizer(), draft=build("llama"), compile_draft=True
        )

"""Hashes of a target and of its head change with their files."""

from pathlib import Path

import mlx.core as mx
import pytest

from mlx_speculation.models.mtp.files import HeadFiles, Stored
from mlx_speculation.models.mtp.fingerprints import (
    BLOCKS,
    WHOLE,
    head_hash,
    target_hash,
)
from mlx_speculation.models.mtp.load import find_mtp_head
from mlx_speculation.models.safetensors_layout import INDEX, places_in
from support.models.mtp_checkpoints import Checkpoint, save, write


@pytest.fixture(name="made")
def _made(tmp_path: Path) -> Checkpoint:
    return write(tmp_path / "model", "qwen3_5")


def hashes(made: Checkpoint) -> tuple[str, str]:
    head = find_mtp_head(made.folder, made.target)
    return target_hash(made.folder), head_hash(head.files)


def flip(file: Path, at: int) -> None:
    whole = bytearray(file.read_bytes())
    whole[at] ^= 1
    file.write_bytes(whole)


def test_a_changed_head_changes_the_hash_of_the_head(made: Checkpoint) -> None:
    before = hashes(made)
    assert before == hashes(made)
    trunk, head = sorted(made.folder.glob("*.safetensors"))
    size = head.stat().st_size
    start = 8 + int.from_bytes(head.read_bytes()[:8], "little")
    for at in {start, -1, *range(start, size, size // 7)}:
        flip(head, at)  # small tensors are hashed in full
        assert hashes(made)[1] != before[1]
        flip(head, at)
    flip(trunk, -1)
    assert hashes(made)[1] == before[1]
    assert hashes(made)[0] != before[0]


def test_a_changed_target_changes_the_hash_of_the_target(made: Checkpoint) -> None:
    before = hashes(made)
    config = made.folder / "config.json"
    config.write_text(config.read_text(encoding="utf-8") + " ", encoding="utf-8")
    changed = hashes(made)
    assert changed[0] != before[0]
    assert changed[1] == before[1]
    trunk, _ = sorted(made.folder.glob("*.safetensors"))
    renamed = "model-00009-of-00002.safetensors"
    index = made.folder / INDEX
    index.write_text(index.read_text().replace(trunk.name, renamed))
    trunk.rename(made.folder / renamed)
    assert target_hash(made.folder) != changed[0]


def test_of_large_tensors_samples_are_read_to_both_ends(tmp_path: Path) -> None:
    """The samples are spread evenly, so a training of all weights changes the hash."""
    file = tmp_path / "large.safetensors"
    save(file, {"a": mx.zeros(WHOLE)})
    files = HeadFiles({"b": Stored(file, "a")}, False, "a file")
    place, before = places_in(file)["a"], head_hash(files)
    step = (place.end - place.begin) // (BLOCKS - 1)
    for at in (place.begin, place.begin + 7 * step, place.end - 1):
        flip(file, at)
        assert head_hash(files) != before
        flip(file, at)
    flip(file, place.begin + step // 2)
    assert head_hash(files) == before

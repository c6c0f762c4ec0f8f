"""Conventions on disk: files that are used, ignored, and never overwritten."""

import json
import os
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_speculation.errors import DraftNotice, ModelFolderError
from mlx_speculation.models import MtpConvention
from mlx_speculation.models.checkpoints.convention import (
    NORM_NAMES,
    convention_of,
    fields_of,
)
from mlx_speculation.models.mtp.convention_store import NAME, Pair, SavedConventions
from mlx_speculation.models.mtp.fingerprints import (
    BLOCK,
    WHOLE,
    _sampled,
    head_hash,
    target_hash,
)
from mlx_speculation.models.mtp.load import find_mtp_head
from mlx_speculation.models.safetensors_layout import INDEX
from support.models.mtp_checkpoints import Checkpoint, write

PAIR = Pair("a" * 64, "b" * 64)
sides = st.sampled_from(["after_norm", "before_norm"])
mixed = st.sets(st.sampled_from(NORM_NAMES), min_size=1).map(
    lambda names: tuple(name for name in NORM_NAMES if name in names)
)
conventions = st.builds(
    MtpConvention,
    hidden=sides,
    recycled=sides,
    order=st.sampled_from(["embedding_first", "hidden_first"]),
    norms=st.sampled_from(["stored", "plus_one"]) | mixed,
)


@pytest.fixture(name="cache", autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("MLX_SPECULATION_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def files_in(folder: Path) -> set[str]:
    """Return all files in a folder, at any depth."""
    paths = folder.rglob("*")
    return {str(file.relative_to(folder)) for file in paths if file.is_file()}


@given(convention=conventions)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_saved_is_found(tmp_path: Path, convention: MtpConvention) -> None:
    saved = SavedConventions(tmp_path, PAIR)
    assert saved.save(convention, {"first draft": {}}) == tmp_path / NAME
    assert saved.find() == (convention, tmp_path / NAME)
    assert files_in(tmp_path) == {NAME}
    assert convention_of(fields_of(convention), "here") == convention


@pytest.mark.parametrize("other", [Pair("c" * 64, "b" * 64), Pair("a" * 64, "c" * 64)])
def test_the_convention_of_another_pair_does_not_count(
    other: Pair, tmp_path: Path
) -> None:
    SavedConventions(tmp_path, PAIR).save(MtpConvention(norms="stored"), {})
    theirs = SavedConventions(tmp_path, other)
    assert theirs.find() is None
    theirs.save(MtpConvention(norms="plus_one"), {})
    assert SavedConventions(tmp_path, PAIR).find() is None


def test_where_nothing_can_be_written_the_cache_folder_has_it(
    tmp_path: Path, cache: Path
) -> None:
    blocked = tmp_path / "a file, not a folder"
    blocked.write_bytes(b"")
    saved = SavedConventions(blocked, PAIR)
    convention = MtpConvention(norms="stored")
    with pytest.warns(DraftNotice, match="cannot be read"):
        file = saved.save(convention, {}) if saved.find() is None else None
    assert file is not None
    assert file.is_relative_to(cache / "mlx-speculation" / "conventions")
    with pytest.warns(DraftNotice, match="cannot be read"):
        assert saved.find() == (convention, file)


@pytest.mark.parametrize("named", ["", "relative/path"])
def test_a_cache_folder_that_is_not_absolute_is_ignored(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLX_SPECULATION_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", named)
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    (tmp_path / "model" / NAME).mkdir(parents=True)  # a folder in place of the file
    saved = SavedConventions(tmp_path / "model", PAIR)
    with pytest.warns(DraftNotice, match="cannot be read"):
        assert saved.find() is None
    file = saved.save(MtpConvention(norms="stored"), {})
    assert file is not None
    assert file.is_relative_to(tmp_path / "me" / ".cache" / "mlx-speculation")


VALID: dict[str, Any] = {
    "format": "mlx-speculation convention",
    "version": 2,
    "target": PAIR.target,
    "head": PAIR.head,
    "convention": fields_of(MtpConvention(norms="stored")),
    "scores": {},
}
BROKEN: dict[str, bytes] = {
    "empty": b"",
    "cut": json.dumps(VALID).encode()[:-9],
    "not text": b"\xff\xfe\x00",
    "a list": b"[1]",
    "deep": b"[" * 60000,
    "long": json.dumps(VALID).encode() + b" " * 70000,
    "a stranger's": json.dumps({"mtp_convention": {"hidden_variant": "x"}}).encode(),
    "later": json.dumps({**VALID, "version": 3}).encode(),
    "more": json.dumps({**VALID, "norms": "stored"}).encode(),
    "less": json.dumps({k: v for k, v in VALID.items() if k != "scores"}).encode(),
    **{
        name: json.dumps({**VALID, "convention": convention}).encode()
        for name, convention in {
            "no convention": None,
            "unknown field": {**VALID["convention"], "position": 1},
            "unknown value": {**VALID["convention"], "hidden": "post_norm"},
            "no norms": {**VALID["convention"], "norms": None},
            "unknown norm": {**VALID["convention"], "norms": ["norm"]},
            "norms of numbers": {**VALID["convention"], "norms": [1]},
            "an empty list": {**VALID["convention"], "norms": []},
            "a list of lists": {**VALID["convention"], "norms": [[]]},
            "a value of another kind": {**VALID["convention"], "order": ["a"]},
        }.items()
    },
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_or_foreign_file_is_said_and_not_trusted(
    name: str, tmp_path: Path, cache: Path
) -> None:
    (tmp_path / NAME).write_bytes(BROKEN[name])
    saved = SavedConventions(tmp_path, PAIR)
    with pytest.warns(DraftNotice, match=r"is passed over: .* name the convention"):
        assert saved.find() is None
    convention = MtpConvention("before_norm", norms="stored")
    file = saved.save(convention, {})
    if _ours(name):
        assert file == tmp_path / NAME  # our own file, with a wrong value
    else:
        assert (tmp_path / NAME).read_bytes() == BROKEN[name]
        assert file is not None
        assert file.is_relative_to(cache)
        with pytest.warns(DraftNotice):
            assert saved.find() == (convention, file)


def test_what_was_found_before_mixtures_were_known_is_found_again(
    tmp_path: Path,
) -> None:
    """Our files of version 1 may be wrong: they are ignored silently and replaced."""
    old = json.dumps({**VALID, "version": 1})
    (tmp_path / NAME).write_text(old, encoding="utf-8")
    saved = SavedConventions(tmp_path, PAIR)
    assert saved.find() is None
    convention = MtpConvention(norms=("q_norm", "k_norm"))
    assert saved.save(convention, {}) == tmp_path / NAME
    assert saved.find() == (convention, tmp_path / NAME)


def _ours(name: str) -> bool:
    try:
        value = json.loads(BROKEN[name])
    except (ValueError, RecursionError):
        return False
    whole = isinstance(value, dict) and value.keys() == VALID.keys()
    return whole and len(BROKEN[name]) < 60000 and value["version"] == 2


def test_a_failure_while_writing_leaves_the_old_file(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = MtpConvention(norms="stored")
    saved = SavedConventions(tmp_path, PAIR)
    saved.save(old, {})
    before = (tmp_path / NAME).read_bytes()

    def full(_: int) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert saved.save(MtpConvention(norms="plus_one"), {}) is None
    assert (tmp_path / NAME).read_bytes() == before
    assert files_in(tmp_path) == {NAME}


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_change_of_a_file_makes_another_convention_count(
    tmp_path: Path, data: st.DataObject
) -> None:
    """A file with changed or lost bytes is read as before, or ignored."""
    whole = json.dumps(VALID).encode()
    at = data.draw(st.integers(0, len(whole) - 1))
    drop = data.draw(st.integers(0, 5))
    changed = whole[:at] + data.draw(st.binary(max_size=2)) + whole[at + drop :]
    (tmp_path / NAME).write_bytes(changed)
    with warnings.catch_warnings(action="ignore"):
        place = SavedConventions(tmp_path, PAIR).find()
    assert place is None or place[0] == MtpConvention(norms="stored")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ([], "is a list"),
        ({"hiden": "after_norm"}, "'hiden'"),
        ({"hidden": "post_norm"}, "'post_norm'"),
        ({"norms": "shifted"}, "'shifted'"),
        ({"norms": ["norm"]}, "'norm'"),
    ],
)
def test_a_field_that_is_not_known_is_refused_by_its_name(
    fields: Any, said: str
) -> None:
    with pytest.raises(ModelFolderError, match=f"(?s)some.json.*{said}|{said}.*"):
        convention_of(fields, "some.json")


@pytest.fixture(name="made")
def _made(tmp_path: Path) -> Checkpoint:
    return write(tmp_path / "model", "qwen3_5")


def hashes(made: Checkpoint) -> Pair:
    """Return the hashes of a checkpoint's target and head."""
    head_files = find_mtp_head(made.folder, made.target)
    return Pair(target_hash(made.folder), head_hash(head_files.files))


def flip(file: Path, at: int) -> None:
    """Change a byte of a file, from the end if `at` is negative."""
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
        assert hashes(made).head != before.head
        flip(head, at)
    flip(trunk, -1)
    assert hashes(made).head == before.head
    assert hashes(made).target != before.target


def test_a_changed_target_changes_the_hash_of_the_target(made: Checkpoint) -> None:
    before = hashes(made)
    config = made.folder / "config.json"
    config.write_text(config.read_text(encoding="utf-8") + " ", encoding="utf-8")
    changed = hashes(made)
    assert changed.target != before.target
    assert changed.head == before.head
    trunk, _ = sorted(made.folder.glob("*.safetensors"))
    renamed = "model-00009-of-00002.safetensors"
    index = made.folder / INDEX
    index.write_text(index.read_text().replace(trunk.name, renamed))
    trunk.rename(made.folder / renamed)
    assert target_hash(made.folder) != changed.target


def test_of_large_files_samples_are_read_to_both_ends(tmp_path: Path) -> None:
    """The blocks are evenly spaced, so training that changes all weights shows."""
    size = 4 * WHOLE
    file = tmp_path / "large"
    file.write_bytes(os.urandom(size))
    with file.open("rb") as opened:
        blocks = list(_sampled(opened, 100, size))
    whole = file.read_bytes()
    assert len(blocks) == 64
    assert blocks[0] == whole[100 : 100 + BLOCK]
    assert blocks[-1] == whole[-BLOCK:]
    gaps = {whole.index(b, 0) - whole.index(a, 0) for a, b in pairwise(blocks)}
    assert max(gaps) - min(gaps) <= 1

"""Machine code of kernels is kept in files; damaged files are not loaded."""

from pathlib import Path

import pytest

from mlx_speculation.models.cuda.kernel import keep, kept_file, read_kept

BINARY = bytes(range(256)) * 40


def test_what_is_kept_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "kernels" / "one.cubin"
    assert read_kept(file) is None
    keep(file, BINARY)
    assert read_kept(file) == BINARY
    assert [path.name for path in file.parent.iterdir()] == ["one.cubin"]


@pytest.mark.parametrize("at", [0, 31, 32, 5000])
def test_a_damaged_file_is_compiled_anew(tmp_path: Path, at: int) -> None:
    file = tmp_path / "one.cubin"
    keep(file, BINARY)
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)
    assert read_kept(file) is None
    file.write_bytes(content[:at])
    assert read_kept(file) is None


def test_each_source_and_each_architecture_has_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_SPECULATION_CACHE", str(tmp_path))
    files = {kept_file(s, a) for s in ("a", "b") for a in ("sm_80", "sm_90")}
    assert len(files) == 4
    assert all(file is not None and tmp_path in file.parents for file in files)


def test_a_folder_that_cannot_be_written_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "kernels").write_text("a file")
    keep(tmp_path / "kernels" / "one.cubin", BINARY)
    assert read_kept(tmp_path / "kernels" / "one.cubin") is None

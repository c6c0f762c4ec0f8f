"""Folders, links and the public names are as documented."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import mlx_speculation

ROOT = Path(__file__).parent.parent
LINKED = ("engine", "models", "caches", "samplers")

TEXT = {"", ".cfg", ".json", ".md", ".py", ".pyi", ".sh", ".toml", ".txt", ".yml"}


def _files() -> Iterator[Path]:
    """Yield the files that git knows or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for line in listed.stdout.splitlines():
        path = ROOT / line
        if path.is_file() and not path.is_symlink():
            yield path


@pytest.mark.parametrize("folder", LINKED)
def test_each_link_resolves_to_its_folder(folder: str) -> None:
    link = ROOT / "src" / "mlx_speculation" / folder
    assert link.is_symlink()
    assert link.readlink() == Path("../..", folder)
    assert link.resolve() == (ROOT / folder).resolve()
    assert (link / "__init__.py").is_file()


def test_the_map_names_every_folder_at_the_top() -> None:
    tops = {path.relative_to(ROOT).parts[0] for path in _files()}
    folders = {top for top in tops if (ROOT / top).is_dir() and top[0] != "."}
    assert folders == {*LINKED, "docs", "examples", "scripts", "src", "tests"}
    page = (ROOT / "docs/architecture.md").read_text("utf-8")
    block = page.split("## Files")[1].split("```")[1]
    named = {line.split("/")[0] for line in block.splitlines() if line[:1].strip()}
    assert named == folders


def test_data_files_of_the_folders_are_packaged() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["mlx_speculation"]
    data = [
        path.relative_to(ROOT)
        for path in _files()
        if path.relative_to(ROOT).parts[0] in LINKED and path.suffix != ".py"
    ]
    assert data
    assert not [path for path in data if not any(map(path.match, patterns))]


def test_the_imported_package_is_this_checkout() -> None:
    assert mlx_speculation.__file__ is not None
    expected = ROOT / "src" / "mlx_speculation" / "__init__.py"
    assert Path(mlx_speculation.__file__).resolve() == expected.resolve()


@pytest.mark.parametrize("name", mlx_speculation.__all__)
def test_each_public_name_is_there_and_listed(name: str) -> None:
    assert getattr(mlx_speculation, name) is not None
    assert name in dir(mlx_speculation)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'speculate'"):
        mlx_speculation.speculate  # noqa: B018


def test_importing_the_front_door_does_not_import_mlx() -> None:
    code = (
        "import sys\nfrom mlx_speculation import blas, cli, demo, errors\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('mlx', 'mlx_lm')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_no_file_names_a_path_of_one_machine() -> None:
    # Joined from parts, so that this file does not match the pattern itself.
    pattern = re.compile(r"(?<![\w.])/(" + "|".join(["tmp", "root", "home"]) + r")/\w")
    named = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in _files()
        if path.suffix in TEXT and "demo" not in path.relative_to(ROOT).parts
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1)
        if pattern.search(line)
    ]
    assert not named

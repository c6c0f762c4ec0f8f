"""Commands that users paste: the program as it was started, and how to install."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mlx_speculation import shell_commands
from mlx_speculation.shell_commands import install_command, program


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o755)
    return path


@pytest.fixture(name="home")
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working folder with an environment that is not on PATH."""
    home = tmp_path / "home"
    for name in ("mlx-speculation", "python", "pip"):
        executable(home / ".venv/bin" / name)
    monkeypatch.chdir(home)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(sys, "argv", [".venv/bin/mlx-speculation", "demo"])
    monkeypatch.setattr(sys, "executable", str(home / ".venv/bin/python"))
    monkeypatch.setattr(shell_commands, "find_spec", lambda name: name)
    return home


def test_a_program_beside_path_is_named_by_its_path(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert program() == ".venv/bin/mlx-speculation"
    monkeypatch.setattr(sys, "argv", [str(home / ".venv/bin/mlx-speculation")])
    assert program() == ".venv/bin/mlx-speculation"
    monkeypatch.chdir(home / ".venv/bin")
    assert program() == "./mlx-speculation"
    monkeypatch.chdir(home.parent)
    assert program() == "home/.venv/bin/mlx-speculation"
    executable(home / "an other/x")
    monkeypatch.chdir(home / "an other")
    assert program() == str(home / ".venv/bin/mlx-speculation")


def test_a_program_on_path_is_named_by_its_name(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable(home.parent / "bin/mlx-speculation")
    assert program() == ".venv/bin/mlx-speculation"  # PATH leads to another one
    monkeypatch.setenv("PATH", str(home / ".venv/bin"))
    assert program() == "mlx-speculation"


def test_a_module_is_started_by_its_python(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = executable(home / "mlx_speculation/__main__.py")
    monkeypatch.setattr(sys, "argv", [str(module), "demo"])
    assert program() == ".venv/bin/python -m mlx_speculation"
    monkeypatch.setattr(sys, "argv", ["own_program.py"])
    assert program() == "mlx-speculation"


CHECKOUT = {"url": "file:///some/a%20checkout", "dir_info": {"editable": True}}


@pytest.mark.parametrize(
    ("origin", "source"),
    [
        (None, "'mlx-speculation[serve]'"),
        ({"url": "file:///a.whl", "archive_info": {}}, "'mlx-speculation[serve]'"),
        (CHECKOUT, "-e '/some/a checkout[serve]'"),
        ({**CHECKOUT, "dir_info": {}}, "'/some/a checkout[serve]'"),
    ],
)
def test_an_extra_is_installed_from_where_the_package_came(
    origin: Any, source: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Installed:
        def read_text(self, name: str) -> str | None:
            return None if origin is None else json.dumps(origin)

    monkeypatch.setattr(shell_commands, "distribution", lambda name: Installed())
    assert install_command("serve") == f".venv/bin/python -m pip install {source}"
    monkeypatch.setenv("PATH", str(home / ".venv/bin"))
    assert install_command("serve") == f"pip install {source}"


@pytest.mark.parametrize(
    ("folder", "source"), [("", "."), ("main", "./main"), ("a/main", "a/main")]
)
def test_a_checkout_here_is_short_and_no_name_of_a_package(
    folder: str, source: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Installed:
        def read_text(self, name: str) -> str:
            return json.dumps({**CHECKOUT, "url": (home / folder).as_uri()})

    monkeypatch.setattr(shell_commands, "distribution", lambda name: Installed())
    assert install_command("all").endswith(f" install -e '{source}[all]'")
    assert install_command("").endswith(f" install -e {source}")


def test_without_pip_uv_installs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell_commands, "find_spec", lambda name: None)
    uv = "uv pip install --python .venv/bin/python "
    assert install_command("plot").startswith(uv)

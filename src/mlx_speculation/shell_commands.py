"""Commands for the user's shell: how this program was started, how to install."""

import json
import shlex
import shutil
import sys
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

NAME = "mlx-speculation"


def program() -> str:
    """Return the command that starts this program again in the same shell."""
    started = Path(sys.argv[0])
    if started.parts[-2:] == ("mlx_speculation", "__main__.py"):
        return f"{_program_word(sys.executable)} -m mlx_speculation"
    if started.name != NAME or not started.is_file():  # a Python program calls `main`
        return NAME
    return _program_word(started)


def installer() -> str:
    """Return the start of a command that installs into this environment."""
    python = _program_word(sys.executable)
    if find_spec("pip") is None:  # as in environments that uv made
        return f"uv pip install --python {python}"
    pip = _program_word(Path(sys.executable).parent / "pip")
    return "pip install" if pip == "pip" else f"{python} -m pip install"


def install_command(extra: str) -> str:
    """Return the command that adds an extra, or none if "", to this installation."""
    return f"{installer()} {source(extra)}"


def source(extra: str) -> str:
    """Return what pip installs: the checkout that is in use, or the package's name."""
    extra = f"[{extra}]" if extra else ""
    try:
        origin = json.loads(distribution(NAME).read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        origin = {}
    if "dir_info" not in origin:
        return shlex.quote(f"{NAME}{extra}")
    folder = Path(unquote(urlsplit(origin["url"]).path))
    option = "-e " if origin["dir_info"].get("editable") else ""
    return option + shlex.quote(f"{_short(folder)}{extra}")


def _program_word(path: str | Path) -> str:
    """Return a program's name if PATH leads to it, else its path, quoted."""
    full = Path(path).absolute()  # not resolved: an environment's python is a link
    on_path = shutil.which(full.name)
    if on_path is not None and Path(on_path).absolute() == full:
        return shlex.quote(full.name)
    return shlex.quote(_short(full))


def _short(path: Path) -> str:
    """Return a path, from the working directory if below it; never a bare name."""
    here = Path.cwd()
    short = str(path.relative_to(here) if path.is_relative_to(here) else path)
    return short if "/" in short or short == "." else f"./{short}"

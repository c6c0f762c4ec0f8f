"""Loading of models and tokenizers with mlx-lm, in the form that this machine needs."""

import time
from collections.abc import Callable, Collection, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import generate_step, wired_limit
from mlx_lm.utils import (
    MODEL_REMAPPING,
    _get_classes,
    load_adapters,
    load_model,
    load_tokenizer,
)

from mlx_speculation.errors import InvalidRequestError, ModelFolderError
from mlx_speculation.models.checkpoints.tensor_kind import (
    NAMES,
    kind_by_tensors,
    tensor_names,
)
from mlx_speculation.models.config_json import read_config
from mlx_speculation.models.dflash.config import is_dflash
from mlx_speculation.models.dflash2.config import is_dflash2
from mlx_speculation.models.dspark.config import is_dspark
from mlx_speculation.models.eagle.config import is_eagle, is_peagle
from mlx_speculation.models.gemma_assistant.config import is_assistant
from mlx_speculation.models.instance_hooks import derived, plain_class
from mlx_speculation.models.model_folder import (
    check_model_folder,
    is_there,
    model_folder,
    shortened,
)
from mlx_speculation.models.mtp.files import is_leftover, is_split_head, sidecar_names
from mlx_speculation.models.quantize import runs_on_linux_cpu, to_float32
from mlx_speculation.models.safetensors_layout import check_index, named_files_only
from mlx_speculation.models.sharding import Group, Parallel, check_parallel, spread
from mlx_speculation.models.token_ids import omitted_length
from mlx_speculation.models.vision.load import load_vision

# Functions that recognize config.json of a kind of drafter; the first match decides.
_DRAFTERS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "an MTP head": is_split_head,
    "a DSpark drafter": is_dspark,
    "a DFlash2 drafter": is_dflash2,
    "a DFlash drafter": is_dflash,
    "a P-EAGLE head": is_peagle,
    "an EAGLE-3 head": is_eagle,
    "a Gemma 4 assistant": is_assistant,
}
wired = wired_limit  # a context manager; does nothing where no memory can be wired
ADAPTER = ("adapter_config.json", "adapters.safetensors")


def load(
    path_or_repo: str | Path,
    *,
    adapter_path: str | Path | None = None,
    trust_remote_code: bool = False,
    group: Group | None = None,
    parallel: Parallel = "tensor",
    vision: bool | None = False,
) -> tuple[nn.Module, Any]:
    """Load a model with mlx-lm, in the form that this device needs.

    Tensors of an MTP head in the model's files are left out, since some make mlx-lm
    fail. All other tensors have to belong to the model.

    Args:
        path_or_repo: a folder in mlx-lm's layout, or the name of a repository.
        adapter_path: a folder of adapter weights that mlx_lm.lora made for the model.
        trust_remote_code: whether code in the folder is allowed to run.
        group: the group over whose ranks the model is spread. Every rank calls `load`,
            and keeps its part of the weights.
        parallel: the way to spread the model: "tensor" or "pipeline".
        vision: whether to load the model with mlx-vlm, as a target that reads images.
            None: do so if the folder has a vision part and mlx-lm lacks the
            architecture. For further errors see `load_vision`.

    Returns:
        The model and mlx-lm's tokenizer wrapper. On a Linux CPU the weights are
        float32, dequantized if necessary; elsewhere they are as on disk.

    Raises:
        ModelFolderError: the folder is not a model, or mlx-lm could not read it or the
            adapter.
        UnsupportedModelError: the model cannot be spread over the ranks in this way.
        InvalidRequestError: `parallel` is unknown, or two of these were requested: an
            adapter, several ranks, vision.
    """
    check_parallel(parallel)
    spreads = group is not None and group.size() > 1
    check_target(path_or_repo)
    check_model_folder(path_or_repo)
    reads_images = bool(vision or (vision is None and _needs_vision(path_or_repo)))
    _check_combination(reads_images, adapter_path is not None, spreads)
    if reads_images:
        return load_vision(path_or_repo, trust_remote_code=trust_remote_code)
    if adapter_path is not None:
        _check_adapter(Path(adapter_path).expanduser())
    folder = model_folder(path_or_repo)
    if not Path(path_or_repo).expanduser().is_dir():  # the repository was fetched
        check_target(folder)
    _check_config(folder, trust_remote_code)
    model, tokenizer = _loaded(folder, path_or_repo, trust_remote_code, lazy=spreads)
    _check_ends(tokenizer.eos_token_ids, path_or_repo)
    if adapter_path is not None:
        model = _adapted(model, Path(adapter_path).expanduser())
    if runs_on_linux_cpu():
        model = to_float32(model, lazy=spreads)
    if group is not None and spreads:
        spread(model, group, parallel)
        mx.eval(model.parameters())
    return model, tokenizer


def _check_combination(reads_images: bool, adapted: bool, spreads: bool) -> None:
    if reads_images and (adapted or spreads):
        raise InvalidRequestError(
            "vision was requested with an adapter or a group of several ranks, but a "
            "vision model takes neither. Fuse the adapter, and leave group out."
        )
    if adapted and spreads:
        raise InvalidRequestError(
            "adapter_path and a group of several ranks were passed, but mlx-lm cannot "
            "spread an adapter's layers. Fuse it first with mlx_lm.fuse."
        )


def _loaded(
    folder: Path, name: str | Path, trust_remote_code: bool, *, lazy: bool
) -> tuple[nn.Module, Any]:
    """Return the model and tokenizer in a folder; errors call the folder `name`."""
    more = {"trust_remote_code": trust_remote_code}
    try:
        model, config = _load_trunk(folder, trust_remote_code, lazy=lazy)
        ends = config.get("eos_token_id")
        model.omitted_length = omitted_length(read_config(folder))
        return model, load_tokenizer(folder, more, eos_token_ids=ends)
    except ModelFolderError:
        raise
    except Exception as error:
        raise ModelFolderError(
            f"mlx-lm {mlx_lm.__version__} could not load {str(name)!r}: "
            f"{type(error).__name__}: {shortened(error)}. Check the folder with "
            "mlx_lm.generate."
        ) from error


def check_target(path_or_repo: str | Path) -> None:
    """Raise `ModelFolderError` for the folder of a drafter."""
    folder = Path(path_or_repo).expanduser()
    if not is_there(folder / "config.json"):
        return
    config = read_config(folder)
    kind = next((name for name, is_kind in _DRAFTERS.items() if is_kind(config)), None)
    if kind is None and (result := kind_by_tensors(tensor_names(folder), "")):
        kind = f"{NAMES[result]} tensors"
    if kind is not None:
        raise ModelFolderError(
            f"{str(path_or_repo)!r} holds {kind}: this is a drafter for another model. "
            "Load that model, and pass the drafter as draft= (--draft)."
        )


def _needs_vision(path_or_repo: str | Path) -> bool:
    """Return whether a model has a vision part and mlx-lm lacks its architecture."""
    config = read_config(model_folder(path_or_repo))
    kind = config.get("model_type")
    if "vision_config" not in config or not isinstance(kind, str):
        return False
    name = MODEL_REMAPPING.get(kind, kind)
    return find_spec(f"mlx_lm.models.{name}") is None


def _check_config(folder: Path, trust_remote_code: bool) -> None:
    """Refuse a config.json that names no architecture, or names untrusted code."""
    config = read_config(folder)
    file, where = config.get("model_file"), str(folder / "config.json")
    if file is not None and not trust_remote_code:
        raise ModelFolderError(
            f"{where!r} has model_file {file!r}: the model is built by code in its "
            "folder, which is not run without permission. If you trust it, pass "
            "trust_remote_code=True (--trust-remote-code)."
        )
    if file is None and not isinstance(config.get("model_type"), str):
        raise ModelFolderError(
            f"{where!r} has model_type {config.get('model_type')!r}; it has to be the "
            "name of an architecture, such as 'llama'. Correct it, or choose another "
            "checkpoint."
        )


def _check_ends(ends: Collection[Any], path_or_repo: str | Path) -> None:
    wrong = [end for end in ends if end is not None and type(end) is not int]
    if wrong:
        raise ModelFolderError(
            f"The configuration of {str(path_or_repo)!r} has eos_token_id "
            f"{wrong[0]!r}, which is not a whole number. Fix config.json or "
            "generation_config.json."
        )


def _check_adapter(folder: Path) -> None:
    missing = [name for name in ADAPTER if not is_there(folder / name)]
    if missing:
        raise ModelFolderError(
            f"The adapter {str(folder)!r} lacks {', '.join(missing)}. Pass the folder "
            "that mlx_lm.lora has written (--adapter-path)."
        )


def _adapted(model: nn.Module, folder: Path) -> nn.Module:
    try:
        model = load_adapters(model, str(folder))
    except Exception as error:
        raise ModelFolderError(
            f"mlx-lm {mlx_lm.__version__} could not load the adapter {str(folder)!r}: "
            f"{type(error).__name__}: {shortened(error)}. Check that it was made for "
            "this model."
        ) from error
    model.eval()
    return model


def _load_trunk(
    folder: Path, trust_remote_code: bool, *, lazy: bool = False
) -> tuple[nn.Module, dict[str, Any]]:
    """Load a model without the tensors of an MTP head that its files can hold."""
    beside = sidecar_names(folder)

    def classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
        kind, arguments = _get_classes(config)

        def sanitize(self: nn.Module, weights: dict[str, Any]) -> dict[str, Any]:
            trunk = len(getattr(self, "layers", ()))

            def is_spare(name: str) -> bool:
                return name in beside or is_leftover(kind.__module__, name, trunk)

            check_index(folder, is_spare)
            kept = {name: each for name, each in weights.items() if not is_spare(name)}
            theirs = getattr(kind, "sanitize", None)
            cleaned: dict[str, Any] = kept if theirs is None else theirs(self, kept)
            return cleaned

        return derived(kind, {"sanitize": sanitize}), arguments

    with named_files_only(folder) as files:
        model, config = load_model(
            files, lazy, get_model_classes=classes, trust_remote_code=trust_remote_code
        )
    model.__class__ = plain_class(model)
    return model, config


def mlx_lm_speed(model: nn.Module, prompt: Sequence[int], tokens: int) -> float:
    """Return the tokens per second of mlx-lm's own greedy decoding, without prefill."""
    started = 0.0
    steps = generate_step(mx.array(list(prompt)), model, max_tokens=tokens)
    for index, _ in enumerate(steps):
        if index == 0:
            started = time.perf_counter()
    mx.synchronize()
    return (tokens - 1) / (time.perf_counter() - started)

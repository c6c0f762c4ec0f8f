"""State of a training, in two files that always belong together.

    state-STEP.safetensors   weights and the optimizer's moments, float32
    state.json               the progress, the options, and the name of the other file

state.json is replaced atomically. A resumed training takes the same steps as one that
was not interrupted.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.json_files import JsonFlawError, load_json, write_json

FORMAT = "mlx-speculation training 1"


@dataclass(slots=True)
class Progress:
    """Progress of a training."""

    steps: int = 0  # planned; 0: not known yet
    dialogues: int = 0  # number of dialogues to learn from
    ids: list[int] = field(default_factory=list)  # of the draft; empty: all
    step: int = 0  # steps taken
    best: tuple[float, int] = (0.0, 0)  # greatest mean accepted length, and its step
    stale: int = 0  # evaluations since the best one
    seconds: float = 0.0  # spent on steps
    losses: list[list[float]] = field(default_factory=list)  # step, mean loss
    history: list[dict[str, Any]] = field(default_factory=list)  # evaluations, in order
    done: bool = False
    sized: dict[str, Any] = field(default_factory=dict)  # options that were reduced


def save_state(
    folder: Path,
    progress: Progress,
    options: dict[str, Any],
    module: nn.Module,
    optimizer: optim.Optimizer,
) -> None:
    """Write the state of a training, the weights first."""
    weights = module.trainable_parameters()
    flat: Any = tree_flatten({"weights": weights, "optimizer": optimizer.state})
    folder.mkdir(parents=True, exist_ok=True)
    name = f"state-{progress.step:07}.safetensors"
    partial = folder / f".partial-{name}"
    mx.save_safetensors(str(partial), dict(flat))
    partial.replace(folder / name)
    head = {"format": FORMAT, "weights": name, "options": options}
    write_json(folder / "state.json", head | {"progress": asdict(progress)})
    for other in folder.glob("state-*.safetensors"):
        if other.name != name:
            other.unlink()


def read_progress(folder: Path, options: dict[str, Any]) -> Progress | None:
    """Return the progress of a training; None: it has not begun.

    Raises:
        InvalidRequestError: state.json cannot be read, or has other options.
    """
    value = _read(folder)
    if value is None:
        return None
    before = value["options"]
    for name, now in sorted(json.loads(json.dumps(options)).items()):
        if before.get(name) != now:
            raise InvalidRequestError(
                f"The training in {str(folder.parent)!r} began with {name} = "
                f"{before.get(name)!r}, and now it is {now!r}. Use the same "
                "options, or another folder."
            )
    return Progress(**value["progress"])


def load_state(folder: Path, module: nn.Module, optimizer: optim.Optimizer) -> None:
    """Load the weights and the optimizer's state.

    Raises:
        InvalidRequestError: a file cannot be read.
    """
    value = _read(folder)
    assert value is not None
    try:
        arrays: Any = mx.load(str(folder / value["weights"]))
    except (OSError, RuntimeError, ValueError) as error:
        raise InvalidRequestError(
            f"The state of the training in {str(folder)!r} cannot be read: {error}. "
            "Take the folder away, and begin again."
        ) from error
    state: Any = tree_unflatten(list(arrays.items()))
    module.update(state["weights"])
    optimizer.init(module.trainable_parameters())
    optimizer.state = state["optimizer"]
    mx.eval(module.parameters(), optimizer.state)


def _read(folder: Path) -> dict[str, Any] | None:
    file = folder / "state.json"
    if not file.exists():
        return None
    try:
        value = load_json(file)
    except JsonFlawError as error:
        raise InvalidRequestError(
            f"{str(file)!r} {error}. Take it away, and begin again."
        ) from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise InvalidRequestError(
            f"{str(file)!r} is no state of a training. Use another folder."
        )
    return value

"""State of a training, in two files that always belong together.

    state-STEP.safetensors   weights and the optimizer's moments, float32
    state.json               the progress, the options, and the name of the other file

A training resumed from them takes the same steps as one that was not interrupted.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.json_files import JsonFlawError, load_json

FORMAT = "mlx-speculation training 1"


@dataclass(slots=True)
class Progress:
    """Progress of a training."""

    steps: int  # planned number of steps
    dialogues: int  # number of dialogues to learn from
    ids: list[int]  # the token ids of the draft; empty: all
    step: int = 0  # number of steps taken
    # The greatest mean accepted length, and the step of its evaluation
    best: tuple[float, int] = (0.0, 0)
    stale: int = 0  # evaluations since the best one
    seconds: float = 0.0  # spent on steps
    # Step and mean loss, in order
    losses: list[tuple[int, float]] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)  # evaluations, in order
    done: bool = False  # whether the training is complete
    # Options that were reduced so that the training fits its minutes
    sized: dict[str, Any] = field(default_factory=dict)


def save_state(
    folder: Path,
    progress: Progress,
    options: dict[str, Any],
    module: nn.Module,
    optimizer: optim.Optimizer,
) -> None:
    """Write the state of a training.

    The name of the file of weights contains the step. state.json names that file and is
    replaced atomically, so the two always belong together.
    """
    tensors = {
        **_flat("weights.", module.trainable_parameters()),
        **_flat("optimizer.", optimizer.state),
    }
    folder.mkdir(parents=True, exist_ok=True)
    name = f"state-{progress.step:07}.safetensors"
    partial = folder / f".partial-{name}"
    mx.save_safetensors(str(partial), tensors)
    partial.replace(folder / name)
    value = {
        "format": FORMAT,
        "weights": name,
        "options": options,
        "progress": {key: getattr(progress, key) for key in Progress.__slots__},
    }
    half = folder / ".partial-state.json"
    half.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    half.replace(folder / "state.json")
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
    changed = sorted(
        name for name in options if before.get(name) != _plain(options[name])
    )
    if changed:
        name = changed[0]
        raise InvalidRequestError(
            f"The training in {str(folder.parent)!r} began with {name} = "
            f"{before.get(name)!r}, and now it is {options[name]!r}. Use the same "
            "options, or another folder."
        )
    progress = value["progress"]
    progress["best"] = tuple(progress["best"])
    progress["losses"] = [tuple(each) for each in progress["losses"]]
    return Progress(**progress)


def load_state(folder: Path, module: nn.Module, optimizer: optim.Optimizer) -> None:
    """Load the weights and the optimizer's state into `module` and `optimizer`.

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
    weights = _part("weights.", arrays)
    module.update(tree_unflatten(weights))
    optimizer.init(module.trainable_parameters())
    optimizer.state = tree_unflatten(_part("optimizer.", arrays))
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


def _flat(begin: str, tree: Any) -> dict[str, mx.array]:
    flat: Any = tree_flatten(tree)
    return {begin + name: value for name, value in flat}


def _part(begin: str, arrays: dict[str, mx.array]) -> list[tuple[str, mx.array]]:
    return [
        (name.removeprefix(begin), value)
        for name, value in arrays.items()
        if name.startswith(begin)
    ]


def _plain(value: Any) -> Any:
    """Return a value as JSON would return it, such as a list for a tuple."""
    return json.loads(json.dumps(value))

"""State of a training, in two files that are replaced together or not at all.

    state.safetensors   weights and the optimizer's moments, float32
    state.json          the step, the plan, what was measured, and the options

A training that goes on from them takes the same steps as one that was not interrupted.
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

    steps: int  # how many are planned
    dialogues: int  # how many are learned from
    ids: list[int]  # the token ids that the draft has; none: all
    step: int = 0  # how many were taken
    # The greatest mean accepted length, and the step of it
    best: tuple[float, int] = (0.0, 0)
    stale: int = 0  # evaluations since then
    seconds: float = 0.0  # of the steps
    # Step and mean loss, in order
    losses: list[tuple[int, float]] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)  # evaluations, in order
    done: bool = False  # whether it has ended
    # Options that were made smaller so that the training fits its minutes
    sized: dict[str, Any] = field(default_factory=dict)


def save_state(
    folder: Path,
    progress: Progress,
    options: dict[str, Any],
    module: nn.Module,
    optimizer: optim.Optimizer,
) -> None:
    """Write where a training stands.

    The step is in the name of the file of weights, and state.json, which is replaced in
    one go, names it: so they always belong together.
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
    """Return where a training stood; None: it has not begun.

    Raises:
        InvalidRequestError: its files cannot be read, or it had other options.
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
    """Take over weights and the optimizer's state.

    Raises:
        InvalidRequestError: the files do not fit.
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
    """Return a value as it comes back from JSON."""
    return json.loads(json.dumps(value))

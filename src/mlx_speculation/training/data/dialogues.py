"""Dialogues as token ids, in one safetensors file that grows.

    tokens        uint32 [n], of all dialogues, one after the other
    counts        uint8 [n], whether a token is one to learn
    ends          int64 [dialogues], the index in `tokens` where each dialogue ends
    held          uint8 [dialogues], whether the dialogue is held out for evaluation
    own           uint8 [dialogues], whether the target wrote the prompt too
    temperature   float32 [dialogues], of the answer

The metadata are `target`, `batches` and `used` of `Dialogues`. The file is replaced
atomically.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from mlx_speculation.errors import InvalidRequestError

FORMAT = "mlx-speculation dialogues 1"


@dataclass(frozen=True, slots=True, eq=False)
class Dialogue:
    """A prompt and its answer."""

    tokens: NDArray[np.uint32]
    # Tokens to learn: of answers, and of the target's own prompts unless held out
    counts: NDArray[np.bool_]
    evaluates: bool  # held out for evaluation
    own_prompt: bool  # the target wrote the prompt too
    temperature: float


@dataclass(slots=True)
class Dialogues:
    """The dialogues in a file."""

    file: Path
    target: str  # the fingerprint of the target that wrote them
    dialogues: list[Dialogue] = field(default_factory=list)  # those of `file`
    batches: int = 0  # number of batches written
    used: int = 0  # number of prompts used from the file of prompts
    others: list[Dialogue] = field(default_factory=list)  # of further files

    @classmethod
    def open(cls, file: Path, target: str, more: Sequence[Path] = ()) -> "Dialogues":
        """Return the dialogues of a file; none if the file does not exist.

        The files in `more` must exist and are only read. `target` is a fingerprint.

        Raises:
            InvalidRequestError: a file has another format, or is of another target.
        """
        dialogues = cls._read(file, target) if file.exists() else cls(file, target)
        for each in more:
            dialogues.others += cls._read(each, target).dialogues
        return dialogues

    @classmethod
    def _read(cls, file: Path, target: str) -> "Dialogues":
        try:
            with safe_open(file, "np") as opened:
                said = opened.metadata() or {}
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise InvalidRequestError(
                f"{str(file)!r} cannot be read: {error}. Name another file of data."
            ) from error
        if said.get("format") != FORMAT:
            raise InvalidRequestError(
                f"{str(file)!r} is not a file of dialogues that a training has "
                "written. Name another file."
            )
        if said.get("target") != target:
            raise InvalidRequestError(
                f"The dialogues in {str(file)!r} were written by another target, "
                f"{said.get('target')!r}; this target is {target!r}. Name another "
                "file."
            )
        return cls(
            file, target, _parted(tensors), int(said["batches"]), int(said["used"])
        )

    @property
    def all(self) -> list[Dialogue]:
        """All dialogues of all files."""
        return [*self.dialogues, *self.others]

    @property
    def training(self) -> list[Dialogue]:
        """Dialogues to learn from."""
        return [each for each in self.all if not each.evaluates]

    @property
    def held_out(self) -> list[Dialogue]:
        """Dialogues to evaluate on."""
        return [each for each in self.all if each.evaluates]

    def add(self, more: Iterable[Dialogue], used: int) -> None:
        """Add a batch, which used `used` prompts of a file, and write all dialogues."""
        self.dialogues.extend(more)
        self.batches += 1
        self.used += used
        self._save()

    def _save(self) -> None:
        every = self.dialogues
        arrays = {
            "tokens": np.concatenate([each.tokens for each in every]),
            "counts": np.concatenate([each.counts for each in every]).astype(np.uint8),
            "ends": np.cumsum([len(each.tokens) for each in every], dtype=np.int64),
            "held": np.array([each.evaluates for each in every], np.uint8),
            "own": np.array([each.own_prompt for each in every], np.uint8),
            "temperature": np.array([each.temperature for each in every], np.float32),
        }
        metadata = {
            "format": FORMAT,
            "target": self.target,
            "batches": str(self.batches),
            "used": str(self.used),
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        partial = self.file.with_name(f".{self.file.name}.partial")
        save_file(arrays, partial, metadata)
        partial.replace(self.file)


def _parted(tensors: dict[str, Any]) -> list[Dialogue]:
    ends = tensors["ends"].tolist()
    columns = (tensors[name].tolist() for name in ("held", "own", "temperature"))
    return [
        Dialogue(
            tensors["tokens"][begin:end],
            tensors["counts"][begin:end].astype(np.bool_),
            bool(evaluates),
            bool(own_prompt),
            round(temperature, 6),  # 0.8 as float32 is another number
        )
        for begin, end, evaluates, own_prompt, temperature in zip(
            [0, *ends[:-1]], ends, *columns, strict=True
        )
    ]

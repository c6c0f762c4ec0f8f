"""What a training is asked for; each field is an option of `mlx-speculation train`."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.option_fields import option

Kind = Literal["eagle", "mtp", "draft"]
DATA = "Data"
LENGTH = "Length and evaluation"
# What may differ when a training is resumed: how long, and what is done afterwards.
_FREE = (
    "minutes",
    "patience",
    "bits",
    "data",
    "data_only",
    "prompts",
    "batch",
    "checkpoint",
    "skip_speed",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """The options of a training."""

    panel: ClassVar[str] = "Training"

    kind: Kind = option(
        "eagle",
        "What to train: an EAGLE-3 head, the MTP head that the target has, or a small "
        "draft model.",
    )
    draft_model: Path | None = option(
        None,
        "Of kind 'draft': folder of the small model, or one with its config.json "
        "alone, which begins with random weights.",
    )
    prompts: Path | None = option(
        None,
        "JSON Lines of prompts: chat messages, 'turns', 'prompt', 'text', or strings. "
        "Without it the target writes its prompts itself.",
        panel=DATA,
    )
    own_prompts: float | None = option(
        None,
        "Share of prompts that the target writes itself. Default: all without "
        "--prompts, none with them.",
        panel=DATA,
        min=0.0,
        max=1.0,
    )
    data: list[Path] | None = option(
        None,
        "File of the token ids that the target has written; it is extended. "
        "Repeatable: further ones, of other runs, are read too. Default: in the folder "
        "of the draft.",
        panel=DATA,
    )
    data_only: bool = option(
        False, "Write the dialogues, and end before the training.", panel=DATA
    )
    dialogues: int = option(
        4096, "Dialogues for the target to write.", panel=DATA, min=1
    )
    held_out: int = option(
        128,
        "Further dialogues, to evaluate on; half of them greedy.",
        panel=DATA,
        min=2,
    )
    prompt_tokens: int = option(
        64, "Longest prompt that the target writes itself.", panel=DATA, min=1
    )
    answer_tokens: int = option(384, "Longest answer.", panel=DATA, min=2)
    batch: int = option(64, "Dialogues written at once.", panel=DATA, min=1)
    steps: int | None = option(
        None, "Optimizer steps. Default: as --epochs or --minutes say.", min=1
    )
    epochs: float = option(10.0, "Passes over the data, without --steps.", min=0.01)
    minutes: float | None = option(
        None,
        "Time for everything. Without --steps as many are planned as fit; with them "
        "the training stops, and the same command resumes it.",
        panel=LENGTH,
        min=0.0,
    )
    rows: int = option(8, "Rows of text in a batch.", min=1)
    slots: int = option(1024, "Drafting positions of a row.", min=8)
    accumulate: int = option(1, "Batches whose gradients are added up.", min=1)
    depths: int | None = option(
        None, "Tokens drafted in training. Default: 6, and 3 of an MTP head.", min=1
    )
    rate: float | None = option(
        None, "Highest learning rate. Default: by kind and hidden size."
    )
    weight_decay: float = option(0.1, "Of matrices.", min=0.0)
    warmup: int = option(100, "Steps of warm-up, at most a tenth of all.", min=0)
    draft_vocab: int = option(
        16384, "Token ids that an EAGLE-3 head drafts from; 0: all.", min=0
    )
    layers: list[int] | None = option(
        None,
        "Layer of the target, from 0, whose output an EAGLE-3 head reads. Repeatable. "
        "Default: the second, a middle and a late one.",
    )
    checkpoint: bool = option(
        False,
        "Compute each depth again for its gradients, which saves memory, also where "
        "the memory would be enough without.",
    )
    seed: int = option(0, "Seed of data, weights and order.")
    patience: int = option(
        5, "Evaluations without gain that end it; 0: never.", panel=LENGTH, min=0
    )
    evaluations: int = option(20, "How often it is evaluated.", panel=LENGTH, min=1)
    bits: int | None = option(
        None, "Store the draft in 4 or 8 bits; only mlx reads it then.", panel=LENGTH
    )
    skip_speed: bool = option(
        False,
        "Do not measure tokens per second at the end, nor write speculation.json.",
        panel=LENGTH,
    )

    def check(self) -> None:
        """Refuse values that are out of range, before anything is loaded.

        Raises:
            InvalidRequestError: names the option.
        """
        if self.kind not in get_args(Kind):
            raise InvalidRequestError(
                f"kind is {self.kind!r}, and one of {', '.join(get_args(Kind))} is "
                "needed."
            )
        if (self.draft_model is None) == (self.kind == "draft"):
            raise InvalidRequestError(
                f"kind is {self.kind!r} and draft_model {self.draft_model}, and the "
                "kind 'draft' takes one, the others none."
            )
        if self.bits not in (None, 4, 8):
            raise InvalidRequestError(f"bits is {self.bits}, and 4 or 8 are known.")
        if self.rate is not None and not self.rate > 0:
            raise InvalidRequestError(f"rate is {self.rate}, and it is above 0.")
        if self.prompts is None and self.own_prompts not in (None, 1.0):
            raise InvalidRequestError(
                f"own_prompts is {self.own_prompts}, and there is no file for the "
                "others. Pass prompts, or leave it out."
            )

    @property
    def own_share(self) -> float:
        """The share of prompts that the target writes itself."""
        if self.own_prompts is not None:
            return self.own_prompts
        return 1.0 if self.prompts is None else 0.0

    @property
    def unrolled(self) -> int:
        """How many tokens are drafted in training."""
        usual = {"eagle": 6, "mtp": 3, "draft": 1}[self.kind]
        return usual if self.depths is None else self.depths

    def fixed(self) -> dict[str, Any]:
        """Return what has to be the same when the training is resumed."""
        held = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: str(value) if isinstance(value, Path) else value
            for name, value in held.items()
            if name not in _FREE
        }

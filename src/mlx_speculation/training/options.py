"""Training options; each field is an option of `mlx-speculation train`."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.option_fields import option

Kind = Literal["eagle", "dflash", "dspark", "mtp", "draft"]
_BLOCKS = ("dflash", "dspark")
DATA = "Data"
BLOCK, ANCHORS, BLOCK_LAYERS, RANK = 8, 128, 3, 64
LENGTH = "Length and evaluation"
# Options that a resumed training can change
_FREE = (
    "minutes",
    "patience",
    "bits",
    "data",
    "data_only",
    "prompts",
    "batch",
    "checkpoint",
    "memory_gb",
    "skip_speed",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """The options of a training."""

    panel: ClassVar[str] = "Training"

    kind: Kind = option(
        "eagle",
        "What to train: an EAGLE-3 head, a DFlash or DSpark drafter of blocks, the MTP "
        "head that the target has, or a small draft model.",
    )
    draft_model: Path | None = option(
        None,
        "For kind 'draft': folder of the small model. If it holds only a config.json, "
        "the model begins with random weights.",
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
        "File for the token ids that the target writes; an existing file is extended. "
        "Repeatable: further files, of other runs, are read too. Default: a file in "
        "the folder of the draft.",
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
    epochs: float = option(
        10.0, "Passes over the data, without --steps and --minutes.", min=0.01
    )
    minutes: float | None = option(
        None,
        "Time for everything. Steps and dialogues are timed first; if needed, --rows, "
        "--batch, --held-out and others are reduced. If no step fits, the "
        "training is refused. With --steps, it stops when the time is up, and the same "
        "command resumes it.",
        panel=LENGTH,
        min=0.0,
    )
    rows: int = option(8, "Rows of text in a batch.", min=1)
    slots: int = option(1024, "Positions of a row where a draft can begin.", min=8)
    accumulate: int = option(1, "Batches whose gradients are added up.", min=1)
    depths: int | None = option(
        None,
        "Tokens that training drafts from each position. Default: 6 for an EAGLE-3 "
        "head, 3 for an MTP head, 1 for a draft model. Not for drafters of blocks, "
        "which draft a block.",
        min=1,
    )
    block: int | None = option(
        None,
        "Positions of a block of a DFlash or DSpark drafter, the first of which is the "
        "known token. DSpark drafts as many tokens, DFlash one fewer. Default: 8.",
        min=2,
    )
    anchors: int | None = option(
        None,
        "For a drafter of blocks: number of blocks in each row of text. They begin at "
        "random places, which change with each pass. Default: 128.",
        min=1,
    )
    draft_layers: int | None = option(
        None, "Layers that a drafter of blocks has. Default: 3.", min=1
    )
    markov_rank: int | None = option(
        None,
        "For a DSpark drafter: rank of its Markov head, by which a token changes the "
        "logits of the next one. Default: 64.",
        min=1,
    )
    rate: float | None = option(
        None, "Highest learning rate. Default: by kind and hidden size."
    )
    weight_decay: float = option(0.1, "Weight decay of matrices.", min=0.0)
    warmup: int = option(100, "Steps of warm-up, at most a tenth of all.", min=0)
    draft_vocab: int | None = option(
        None,
        "Number of token ids that a new head can draft; 0: all. Default: 16384 for an "
        "EAGLE-3 head; all, with the target's output layer, for a drafter of blocks.",
        min=0,
    )
    layers: list[int] | None = option(
        None,
        "Layer of the target, from 0, whose output a new head reads. Repeatable. "
        "Default: the second, a middle and a late one; five for a drafter of blocks.",
    )
    checkpoint: bool = option(
        False,
        "Always compute each depth again for its gradients, to save memory. Without "
        "this option: only if memory is short.",
    )
    memory_gb: float | None = option(
        None,
        "Maximum memory to use, in GB, if others use the same machine or GPU. Default: "
        "nearly all, as in mlx.",
        min=0.0,
    )
    seed: int = option(0, "Seed of data, weights and order.")
    patience: int = option(
        5, "End after so many evaluations without gain; 0: never.", panel=LENGTH, min=0
    )
    evaluations: int = option(20, "Number of evaluations.", panel=LENGTH, min=1)
    bits: int | None = option(
        None, "Store the draft in 4 or 8 bits; only mlx reads it then.", panel=LENGTH
    )
    skip_speed: bool = option(
        False,
        "Do not measure tokens per second at the end, nor write speculation.json.",
        panel=LENGTH,
    )

    def check(self) -> None:
        """Refuse values that are out of range or contradict each other."""
        if self.kind not in get_args(Kind):
            raise InvalidRequestError(
                f"kind is {self.kind!r}, but has to be one of "
                f"{', '.join(get_args(Kind))}."
            )
        if (self.draft_model is None) == (self.kind == "draft"):
            raise InvalidRequestError(
                f"kind is {self.kind!r} and draft_model is {self.draft_model}; kind "
                "'draft' needs a draft_model, and no other kind has one."
            )
        self._check_blocks()
        if self.bits not in (None, 4, 8):
            raise InvalidRequestError(f"bits is {self.bits}; it must be 4 or 8.")
        if self.rate is not None and not self.rate > 0:
            raise InvalidRequestError(f"rate is {self.rate}; it must be above 0.")
        if self.prompts is None and self.own_prompts not in (None, 1.0):
            raise InvalidRequestError(
                f"own_prompts is {self.own_prompts}, but there is no file for the "
                "other prompts. Pass prompts, or leave own_prompts out."
            )

    def _check_blocks(self) -> None:
        wrong = {
            "depths": self.blocks,
            "block": not self.blocks,
            "anchors": not self.blocks,
            "draft_layers": not self.blocks,
            "markov_rank": self.kind != "dspark",
        }
        for name, refused in wrong.items():
            if refused and getattr(self, name) is not None:
                raise InvalidRequestError(
                    f"{name} is {getattr(self, name)}, but kind is {self.kind!r}, "
                    f"which has no such option. Leave {name} out."
                )

    @property
    def blocks(self) -> bool:
        """Return whether a block drafter is trained."""
        return self.kind in _BLOCKS

    @property
    def own_share(self) -> float:
        """The share of prompts that the target writes itself."""
        if self.own_prompts is not None:
            return self.own_prompts
        return 1.0 if self.prompts is None else 0.0

    @property
    def unrolled(self) -> int:
        """Number of tokens that training drafts from a slot."""
        if self.blocks:
            rows = self.block or BLOCK
            return rows if self.kind == "dspark" else rows - 1
        usual = {"eagle": 6, "mtp": 3, "draft": 1}[self.kind]
        return usual if self.depths is None else self.depths

    @property
    def drafted_slots(self) -> int | None:
        """Number of slots per row from which training drafts; None: all."""
        return (self.anchors or ANCHORS) if self.blocks else None

    @property
    def vocabulary(self) -> int:
        """Number of token ids that a new head drafts from; 0: all."""
        usual = 0 if self.blocks else 16384
        return usual if self.draft_vocab is None else self.draft_vocab

    def fixed(self) -> dict[str, Any]:
        """Return the options that a resumed training must not change."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["draft_vocab"] = self.vocabulary
        return {
            name: str(value) if isinstance(value, Path) else value
            for name, value in values.items()
            if name not in _FREE
        }

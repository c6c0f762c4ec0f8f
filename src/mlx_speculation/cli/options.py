"""Options that several commands share, in groups."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import typer

from mlx_speculation.blas import BlasName
from mlx_speculation.cli.inputs import parsed_json, sound_text
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.option_fields import option

if TYPE_CHECKING:
    from mlx_speculation import Sampling, SpeculativeGenerator
    from mlx_speculation.engine.options import StreamKeywords

DRAFT = "Draft and its length"
VISION = "Load a target that reads images, with mlx-vlm."
TEMPLATE = "Prompt and chat template"

Blas = Annotated[
    BlasName,
    typer.Option(
        envvar="MLX_SPECULATION_BLAS",
        help="BLAS library for float32 matrix products on a Linux CPU.",
    ),
]
DraftLength = Annotated[
    int | None,
    typer.Option(
        "--draft-length",
        "--num-draft-tokens",
        min=0,
        rich_help_panel=DRAFT,
        help="Tokens drafted per round; 0: plain decoding. Default: as many as save "
        "time.",
    ),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json", help="Print one JSON object and nothing else on standard output."
    ),
]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet", "-q", help="Print no statistics and no progress on standard error."
    ),
]
Model = Annotated[
    str,
    typer.Argument(
        help="Folder or repository of the target model, as in mlx-lm.",
        show_default=False,
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Allow Python code in the model folders to run.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Options of a target and its BLAS."""

    model: Model
    adapter_path: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a LoRA adapter of the target, made by mlx_lm.lora."
        ),
    ] = None
    trust_remote_code: TrustRemoteCode = False
    blas: Blas = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions(ModelOptions):
    """Options of a target and its draft length."""

    draft_length: DraftLength = None
    draft_tree: int | None = option(
        None,
        "Let an EAGLE-3 head draft trees of so many tokens, 2 to 64.",
        panel=DRAFT,
    )
    quantize_draft: int | None = option(
        None, "Quantize the draft's weights to 2, 3, 4, 5, 6 or 8 bits.", panel=DRAFT
    )
    draft_vocabulary: Literal["intersection"] | None = option(
        None,
        "Use a draft model with another tokenizer; it drafts the tokens that both "
        "tokenizers have.",
        panel=DRAFT,
    )
    compile_draft: bool = option(
        False,
        "Compile the steps of a small draft model on a CPU; takes 16 seconds once per "
        "machine.",
        panel=DRAFT,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOptions(TargetOptions):
    """Options of a target with one draft."""

    draft: str | None = option(
        "auto",
        "Folder or repository of a draft, 'mtp', 'lookup', 'none', or 'auto': what the "
        "target's folder offers, and a lookup.",
        "--draft",
        "--draft-model",
        panel=DRAFT,
    )
    history: int | None = option(
        None,
        "Tokens of earlier answers that a lookup looks in; 0: none. Default: 200000.",
        min=0,
        panel=DRAFT,
        show_default=False,
    )
    exact: int = option(
        0,
        "Tokens in every forward, such as 8, for bit-exact texts; 0: off.",
        min=0,
        max=64,
    )

    def __post_init__(self) -> None:
        if self.draft == "none":
            object.__setattr__(self, "draft", None)

    def for_loading(self) -> dict[str, Any]:
        """Return the keywords of `SpeculativeGenerator.from_pretrained`."""
        names = [each.name for each in fields(self)]
        given = {name: getattr(self, name) for name in names}
        del given["model"], given["blas"]
        return {**given, "exact": self.exact or False}


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftsOptions(TargetOptions):
    """Options of a target with several drafts."""

    draft: list[str] | None = option(
        None,
        "Folder or repository of a draft, 'mtp', 'lookup', or 'auto': what the "
        "target's folder offers, and a lookup. Repeatable.",
        "--draft",
        "--draft-model",
        panel=DRAFT,
    )

    def pairs(self) -> list[PairOptions]:
        """Return the options of the target with each of its drafts.

        Lookups keep no history, since it would hold the answers of other passes.
        """
        shared = {one.name: getattr(self, one.name) for one in fields(TargetOptions)}
        none = {"auto": 0, "lookup": 0}
        names = dict.fromkeys(self.draft or ())
        return [PairOptions(**shared, draft=n, history=none.get(n)) for n in names]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Sampling options."""

    panel: ClassVar[str] = "Sampling, as mlx-lm names it"

    temperature: float = option(0.0, "0: greedy.", "--temperature", "--temp")
    top_p: float = option(0.0, "0: off.")
    min_p: float = option(0.0, "0: off.")
    min_tokens_to_keep: int = option(1, "Minimum number of tokens that min-p keeps.")
    top_k: int = option(0, "0: off.")
    xtc_probability: float = option(
        0.0, "Probability that XTC drops the likeliest tokens."
    )
    xtc_threshold: float = option(0.1, "Probability above which XTC drops tokens.")
    repetition_penalty: float | None = option(
        None, "Divides the logits of recent tokens."
    )
    repetition_context_size: int = option(20, "Recent tokens it applies to; 0: all.")
    presence_penalty: float | None = option(
        None, "Subtracted from the logits of recent tokens."
    )
    presence_context_size: int = option(20, "Recent tokens it applies to; 0: all.")
    frequency_penalty: float | None = option(
        None, "Subtracted for each recent occurrence."
    )
    frequency_context_size: int = option(20, "Recent tokens it applies to; 0: all.")
    logit_bias: str | None = option(
        None, "JSON object of what to add to logits by token id: '{\"13\": -9}'."
    )
    seed: int | None = option(None, "Seed of the random numbers.")

    def check(self) -> None:
        """Refuse values that are out of range."""
        self._options()

    def sampling(self, tokenizer: Any) -> "Sampling":
        """Return the values as a `Sampling`; XTC never drops newlines or end tokens."""
        if not self.xtc_probability:
            return self._options()
        line = tokenizer.encode("\n", add_special_tokens=False)
        special = [int(token) for token in (*line, *tokenizer.eos_token_ids)]
        return self._options(xtc_special_tokens=special)

    def _options(self, **more: Any) -> "Sampling":
        from mlx_speculation import Sampling

        given = {field.name: getattr(self, field.name) for field in fields(self)}
        given["logit_bias"] = self._biases()
        return Sampling(**given, **more)

    def _biases(self) -> dict[int, Any] | None:
        if self.logit_bias is None:
            return None
        biases = parsed_json("--logit-bias", self.logit_bias)
        try:
            return {int(token): bias for token, bias in biases.items()}
        except (AttributeError, ValueError) as error:
            raise InvalidRequestError(
                f"--logit-bias is {self.logit_bias}, and a JSON object of token ids "
                "with a number each is needed, such as '{\"13\": -9}'."
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOptions:
    """Options that end a text."""

    max_tokens: int = option(
        256, "Maximum number of tokens to generate.", "--max-tokens", "-m", min=1
    )
    stop: list[str] | None = option(
        None,
        "Stop string; the text ends before it. Repeatable.",
        show_default=False,
    )
    extra_eos_token: list[str] | None = option(
        None, "Additional end-of-text token. Repeatable."
    )
    max_model_len: int = option(
        0, "Longest prompt; 0: what the model is made for.", min=0
    )

    def longest(self, generator: "SpeculativeGenerator") -> int | None:
        """Return the maximum number of prompt tokens; None: there is no limit."""
        return self.max_model_len or generator.context_length

    def check(self) -> None:
        """Refuse stop strings that are not UTF-8."""
        for text in self.stop or ():
            sound_text("--stop", text)

    def for_stream(self, tokenizer: Any) -> "StreamKeywords":
        """Return the keywords of `SpeculativeGenerator.stream`."""
        return {
            "max_tokens": self.max_tokens,
            "stop": [sound_text("--stop", text) for text in self.stop or ()],
            "stop_tokens": self._stop_tokens(tokenizer),
        }

    def _stop_tokens(self, tokenizer: Any) -> set[int]:
        """Return the ids that end a text; refuse unknown tokens."""
        vocabulary = tokenizer.get_vocab() if self.extra_eos_token else {}
        ends = {int(token) for token in tokenizer.eos_token_ids if token is not None}
        for token in self.extra_eos_token or ():
            if token not in vocabulary:
                raise InvalidRequestError(
                    f"--extra-eos-token is {token!r}, and the tokenizer has no such "
                    f"token among its {len(vocabulary)}. To end at any other text, "
                    "pass it as --stop."
                )
            ends.add(int(vocabulary[token]))
        return ends

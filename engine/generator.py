"""The public generator: a target, an optional draft, and streams of text."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any, Unpack

import mlx.nn as nn

from mlx_speculation.engine.batch.prompt_list import generate_batch
from mlx_speculation.engine.calibrate import (
    Progress,
    calibrate,
    calibrate_batches,
    follow,
)
from mlx_speculation.engine.config import make_config
from mlx_speculation.engine.draft_length.costs import CostTable, PartsTable
from mlx_speculation.engine.draft_length.policy_factory import PolicyFactory
from mlx_speculation.engine.drafters.draft import Draft
from mlx_speculation.engine.drafters.resolve import find_draft
from mlx_speculation.engine.options import (
    GeneratorKeywords,
    GeneratorOptions,
    StreamKeywords,
    StreamOptions,
)
from mlx_speculation.engine.prompt import Prompt
from mlx_speculation.engine.result import Result
from mlx_speculation.engine.stream import Stream
from mlx_speculation.engine.stream_factory import StreamFactory
from mlx_speculation.models import MtpConvention, Parallel, load


class SpeculativeGenerator:
    """Generates text with an mlx-lm model, faster if a draft helps.

    At temperature 0, and above 0 for a given seed, the text equals that of plain
    decoding, whatever the draft and its length.

        generator = SpeculativeGenerator(model, tokenizer, draft=small_model)
        print(generator.generate("def fib(n):", max_tokens=64).text)

    `tokenizer` is mlx-lm's wrapper or a Hugging Face one. `options` are the fields of
    `GeneratorOptions`.

    Streams of one generator are independent of each other, unless `draft` is a drafter
    object of your own, which drafts for one open stream at a time.

    A drafter that fails is disabled for the rest of the stream, and the text goes on:
    `stats.drafter_faults` and a `DrafterFaultWarning` say how it failed.

    Raises:
        InvalidRequestError: an argument is out of range or of the wrong kind.
        UnsupportedCacheError: the model's caches are of an unknown kind.
        UnsupportedModelError: the target cannot be decoded on several ranks.
        RankMismatchError: the ranks run different versions, or different programs.
        RankLostError: a rank is gone.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Any, **options: Unpack[GeneratorKeywords]
    ) -> None:
        self._setup = make_config(model, tokenizer, GeneratorOptions(**options))
        self._streams = StreamFactory(self._setup)

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo: str | Path,
        *,
        convention: MtpConvention | None = None,
        quantize_draft: int | None = None,
        adapter_path: str | Path | None = None,
        trust_remote_code: bool = False,
        parallel: Parallel = "tensor",
        vision: bool | None = None,
        history: int | None = None,
        **options: Unpack[GeneratorKeywords],
    ) -> "SpeculativeGenerator":
        """Load a target, and a draft model if `draft` names one.

        Args:
            path_or_repo: a folder in mlx-lm's layout, or the name of a repository.
            convention: the convention of an MTP head's training; None: probed.
            quantize_draft: bits to quantize the loaded draft to: 2 to 6, or 8.
            adapter_path: a folder of adapter weights for the target, by mlx_lm.lora.
            trust_remote_code: let code in the folders of target and draft model run.
            parallel: how the target is sharded over `group`. A draft model is loaded on
                rank 0 only.
            vision: load the target with mlx-vlm, to read images. None: only if the
                folder has a vision part and mlx-lm does not know the architecture.
            history: how many tokens of earlier answers a lookup searches, for `draft`
                "lookup" or "auto"; see `LookupDraft`.
            options: the fields of `GeneratorOptions`. `draft="auto"` takes the draft
                that speculation.json in the folder names, else the folder's head, and
                adds a lookup. If heads of the target's family are known and none can be
                loaded, `notices` says why.

        Raises:
            ModelFolderError: a folder is not a model, or has no complete head, or its
                speculation.json is wrong.
            ConventionError: the head fits the target under no known convention.
            UnsupportedModelError: the named head does not support the target.
            TokenizerMismatchError: target and draft do not share their token ids.
        """
        options["draft"] = find_draft(
            options.get("draft"),
            convention=convention,
            quantize_draft=quantize_draft,
            target=path_or_repo,
            trust_remote_code=trust_remote_code,
            history=history,
        )
        model, tokenizer = load(
            path_or_repo,
            adapter_path=adapter_path,
            trust_remote_code=trust_remote_code,
            group=options.get("group"),
            parallel=parallel,
            vision=vision,
        )
        return cls(model, tokenizer, **options)

    @property
    def notices(self) -> tuple[str, ...]:
        """Notes on why the draft is not the requested one, or on guesses about it."""
        return self._setup.notices

    @property
    def model(self) -> nn.Module:
        """The target."""
        return self._setup.model

    @property
    def draft_models(self) -> SequenceOf[nn.Module]:
        """The models that draft; none for a head, a lookup or plain decoding."""
        return self._setup.draft_models

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer, in mlx-lm's wrapper."""
        return self._setup.tokenizer

    @property
    def context_length(self) -> int | None:
        """The number of tokens that the target was made for; None: unknown."""
        return self._setup.prompts.context_length

    @property
    def ranks(self) -> int:
        """Number of ranks over which the target is sharded."""
        return 1 if self._setup.ranked is None else self._setup.ranked.group.size

    @property
    def draft(self) -> Draft | None:
        """The draft, which can be passed to another generator of this target."""
        return self._setup.draft

    @property
    def exact(self) -> int | None:
        """The number of rows of every forward in exact mode; None: not exact mode."""
        shape = self._setup.options.shape
        return None if shape is None else shape.rows

    @property
    def draft_length(self) -> int | None:
        """The number of tokens drafted in a round; None: chosen by measured costs."""
        return self._setup.lengths.usual

    def replayed(self, ids: list[int]) -> list[int]:
        """Return a prompt in which earlier answers have the ids that were generated."""
        return self._setup.prompts.replay(ids)

    def encode(self, prompt: Prompt | Iterable[int]) -> list[int]:
        """Return a prompt's token ids: encode text or messages; check ids.

        Raises:
            InvalidRequestError: the prompt has no token, or an id the target lacks.
        """
        return self._setup.prompts.encode(prompt)

    @property
    def lengths(self) -> PolicyFactory:
        """Factory of draft length policies."""
        return self._setup.lengths

    @property
    def round_parts(self) -> PartsTable:
        """Median seconds of a round's parts, by context bucket and draft length."""
        return self._setup.lengths.calibrated().measured

    def calibrate(
        self, contexts: SequenceOf[int] = (64,), *, progress: Progress | None = None
    ) -> CostTable:
        """Measure the costs of rounds on this machine, and store them in a file.

        72 rounds run for each context; `round_parts` has the parts of their time. On
        one rank and without exact mode, 26 more in all find how many layers a forward
        should submit at once. Without calibration, the first streams measure the costs.

        `contexts` are numbers of tokens in the caches. Costs are taken as equal up to
        512 tokens (bucket 0), from there to 1,024 (bucket 1), to 2,048 and so on.
        `progress` is called with the numbers of measured rounds and of all rounds of a
        context.

        Returns:
            Seconds of a round by context bucket and draft length; empty on ranks other
            than 0.

        Raises:
            InvalidRequestError: there is no draft, or a context is below 1 or needs
                more positions than the target has.
        """
        start = self._streams.start_calibration()
        if not self._setup.decides:
            follow(start, contexts, self._setup.lengths.longest)
            return {}
        return calibrate(self, start, contexts, progress)

    def calibrate_batches(
        self,
        rows: SequenceOf[int],
        *,
        contexts: SequenceOf[int] = (64,),
        progress: Progress | None = None,
    ) -> dict[int, CostTable]:
        """Measure costs of batch rounds; return a table for each number of rows.

        Costs of other numbers of rows are estimated from these. `contexts` are those of
        the longest row. The tables and `progress` are as for `calibrate`.

        Raises:
            InvalidRequestError: there is no draft, a number is below 1, rows of this
                target and draft cannot run together, or there are several ranks.
        """
        calibration = self._streams.start_calibration()
        return calibrate_batches(self, calibration, rows, contexts, progress)

    def generate(self, prompt: Prompt, **options: Unpack[StreamKeywords]) -> Result:
        """Generate to the end, with the arguments of `stream`."""
        stream = self.stream(prompt, **options)
        for _ in stream:
            pass
        return stream.result

    def generate_batch(
        self,
        prompts: SequenceOf[Prompt],
        *,
        max_rows: int = 32,
        each: SequenceOf[StreamKeywords] = (),
        **options: Unpack[StreamKeywords],
    ) -> list[Result]:
        """Return the results of prompts, in their order; see `BatchGenerator`.

        Entry i of `each` replaces options of prompt i; (): none. If `sampling` in
        `options` has a seed, prompt i gets `derived_seed(seed, i)`.

        Raises:
            InvalidRequestError: two values do not fit together; nothing has run.
            Exception: the error of the first row that failed, once all rows have ended.
        """
        return generate_batch(self, prompts, max_rows, options, each)

    def stream(self, prompt: Prompt, **options: Unpack[StreamKeywords]) -> Stream:
        """Return a new stream; nothing runs before its first chunk is requested.

        `prompt` is text, token ids, or the messages of a chat, which go through the
        tokenizer's chat template. `options` are the fields of `StreamOptions`.

        Raises:
            InvalidRequestError: two values do not fit together; the message names both.
            ConstraintError: the constraint fails before the first token.
        """
        return self._streams.make(prompt, StreamOptions(**options))

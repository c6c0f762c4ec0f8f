"""The front door: a target, perhaps a draft, and streams of text from them."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any, Unpack

import mlx.nn as nn

from mlx_speculation.engine.batch.calibration import calibrate_batches
from mlx_speculation.engine.batch.prompt_list import generate_batch
from mlx_speculation.engine.config import make_config
from mlx_speculation.engine.draft_length.calibration import PartsTable, Progress, follow
from mlx_speculation.engine.draft_length.costs import CostTable
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
    """Generates text with an mlx-lm model, faster where a draft helps.

    The text is that of plain decoding: with temperature 0, and with a seed above it,
    whatever the draft and its length.

        generator = SpeculativeGenerator(model, tokenizer, draft=small_model)
        print(generator.generate("def fib(n):", max_tokens=64).text)

    Streams of one generator are independent of each other, unless `draft` is a
    drafter object of your own: that serves one open stream at a time.

    A drafter that fails is disabled for the rest of the stream, and the text goes on:
    `stats.drafter_faults` and a `DrafterFaultWarning` say how it failed.

    Args:
        model: an mlx-lm model.
        tokenizer: its tokenizer, mlx-lm's wrapper or a Hugging Face one.
        options: the fields of `GeneratorOptions`.

    Raises:
        InvalidRequestError: an argument is out of range or of the wrong kind.
        UnsupportedCacheError: the model's caches are of an unknown kind.
        UnsupportedModelError: the target cannot be decoded on several ranks.
        RankMismatchError: the ranks run other versions, or other programs.
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
        """Load a target, and a draft model where `draft` names one.

        Args:
            path_or_repo: a folder in mlx-lm's layout, or the name of a repository.
            convention: of an MTP head's training; probed when omitted.
            quantize_draft: bits of the loaded draft's or head's weights: 2 to 6, or 8.
            adapter_path: a folder of adapter weights for the target, by mlx_lm.lora.
            trust_remote_code: let code in the folders of target and draft model run.
            parallel: how `group` spreads the target: "tensor" or "pipeline". A draft
                model is read on rank 0 alone.
            vision: load a target that reads images, with mlx-vlm; None: where the
                folder has a vision part and mlx-lm does not know the architecture.
            history: tokens of earlier answers for draft="lookup"; see `LookupDraft`.
            options: the fields of `GeneratorOptions`. `draft="auto"` takes what
                speculation.json in the folder names, else the head in it, and a lookup;
                `notices` says why it is alone where a head was expected.

        Raises:
            ModelFolderError: a folder is not a model, or has no whole head, or its
                speculation.json is wrong.
            ConventionError: the head agrees with the target by no convention.
            UnsupportedModelError: the target is of no family whose heads are known.
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
        """Notes on a draft that is not the one wished for, or was guessed in part."""
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
        """Tokens that the target was made for; None: unknown."""
        return self._setup.prompts.context_length

    @property
    def ranks(self) -> int:
        """Number of ranks that the target is spread over."""
        return 1 if self._setup.ranked is None else self._setup.ranked.group.size

    @property
    def draft(self) -> Draft | None:
        """The draft; another generator of this target takes it too."""
        return self._setup.draft

    @property
    def exact(self) -> int | None:
        """The rows of every forward in exact mode; None: it is not in that."""
        shape = self._setup.options.shape
        return None if shape is None else shape.rows

    @property
    def draft_length(self) -> int | None:
        """The tokens drafted in a round; None: as many as pay, by measurement."""
        return self._setup.lengths.usual

    def replayed(self, ids: list[int]) -> list[int]:
        """Return the prompt with the ids that earlier answers were generated in."""
        return self._setup.prompts.replay(ids)

    def encode(self, prompt: Prompt | Iterable[int]) -> list[int]:
        """Return a prompt's token ids: text or messages encoded, or ids checked.

        Raises:
            InvalidRequestError: there is no token, or one that the target lacks.
        """
        return self._setup.prompts.encode(prompt)

    @property
    def lengths(self) -> PolicyFactory:
        """Factory of draft length policies, for `BatchGenerator`."""
        return self._setup.lengths

    @property
    def round_parts(self) -> PartsTable:
        """The median parts of calibrated rounds, by context bucket and draft length."""
        return self._setup.lengths.parts

    def calibrate(
        self, contexts: SequenceOf[int] = (64,), *, progress: Progress | None = None
    ) -> CostTable:
        """Measure what rounds cost here, by draft length, and keep it in a file.

        It takes 72 rounds for each context; `round_parts` has the parts. Without it the
        first streams measure what they need. 26 more find after how many layers a
        round's forward is best submitted, on one rank and not in exact mode.

        Args:
            contexts: numbers of tokens in the caches to measure at. Costs between 512,
                1,024, 2,048 ... tokens are taken for equal.
            progress: called with the number of measured rounds, and of all.

        Returns:
            Seconds of a round by context bucket (0: up to 512 tokens, 1: up to 1,024)
            and draft length; nothing on other ranks than rank 0.

        Raises:
            InvalidRequestError: there is no draft, or a context is not at least 1.
        """
        start = self._streams.start_calibration()
        if not self._setup.decides:
            follow(start, contexts, self._setup.lengths.longest)
            return {}
        part = self.ranks == 1 and self.exact is None
        return self._setup.lengths.calibrate(start, contexts, progress, part=part)

    def calibrate_batches(
        self,
        rows: SequenceOf[int],
        *,
        contexts: SequenceOf[int] = (64,),
        progress: Progress | None = None,
    ) -> dict[int, CostTable]:
        """Measure costs of batch rounds; return a table for each number of rows.

        Args:
            rows: numbers of rows; what is known of one is a guess for the others.
            contexts: as `calibrate` has them, of the longest row.
            progress: likewise.

        Raises:
            InvalidRequestError: there is no draft, a number is not at least 1, rows of
                this target and draft run alone, or the target is on several ranks.
        """
        calibration = self._streams.start_calibration()
        return calibrate_batches(self, calibration, rows, contexts, progress)

    def generate(self, prompt: Prompt, **options: Unpack[StreamKeywords]) -> Result:
        """Generate to the end; takes what `stream` takes."""
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

        Args:
            prompts: what `stream` takes, one for each text.
            max_rows: how many run at once.
            each: the options of each prompt that are not those of all.
            options: the fields of `StreamOptions` for all. Of one `sampling` with a
                seed for all, prompt i has `derived_seed(seed, i)`.

        Raises:
            InvalidRequestError: names the two values that do not fit; nothing has run.
            Exception: what ended the first row that failed, when all have ended.
        """
        return generate_batch(self, prompts, max_rows, options, each)

    def stream(self, prompt: Prompt, **options: Unpack[StreamKeywords]) -> Stream:
        """Start a generation; nothing runs before the first chunk is asked for.

        Args:
            prompt: text, token ids, or the messages of a chat, which go through the
                tokenizer's chat template.
            options: the fields of `StreamOptions`.

        Raises:
            InvalidRequestError: names the two values that do not fit.
            ConstraintError: the constraint fails before the first token.
        """
        return self._streams.make(prompt, StreamOptions(**options))

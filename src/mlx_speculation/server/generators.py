"""The generators of one target: one for each draft and mode that requests ask for.

Any thread may use `encode`, `check_length` and the template; the rest is the engine's.
"""

import gc
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from mlx_speculation.engine import SpeculativeGenerator
from mlx_speculation.engine.options import GeneratorKeywords
from mlx_speculation.errors import InvalidRequestError, SpeculationError
from mlx_speculation.models.vision import VisionTarget
from mlx_speculation.server.api_errors import ApiError, invalid
from mlx_speculation.server.batch_runner import Rows
from mlx_speculation.server.config import Settings
from mlx_speculation.server.job import Job
from mlx_speculation.server.metrics import Metrics
from mlx_speculation.server.prompts.rendering import ChatTemplate, refused

if TYPE_CHECKING:
    from mlx_speculation import PrefixCache


class Generators:
    """Loaded models, and the rows of each draft and mode."""

    def __init__(
        self,
        generator: SpeculativeGenerator,
        settings: Settings,
        metrics: Metrics,
        prefixes: "PrefixCache | None",
        done: Callable[[], None],  # called when a request has ended
    ) -> None:
        self._limits, self._prefixes = settings.limits, prefixes
        self._rows_of = partial(Rows, settings=settings, metrics=metrics, done=done)
        rows = self._rows_of(generator)
        self._rows: dict[tuple[str | None, bool], Rows] = {(None, False): rows}
        # The maximum number of tokens of a prompt and its text
        self.longest, self._positions = rows.longest, rows.positions
        self._generator: SpeculativeGenerator | ApiError = generator
        self._drafts_nothing = generator.draft is None
        self.tokenizer = generator.tokenizer
        self.template = ChatTemplate(self.tokenizer, settings.chat_template_args)
        self.reads_images = isinstance(generator.model, VisionTarget)
        self.token_ids = 1 + max(self.tokenizer.get_vocab().values(), default=0)

    def __len__(self) -> int:
        """The number of requests."""
        return sum(len(rows) for rows in self._rows.values())

    @property
    def running(self) -> int:
        """The number of rows that have begun."""
        return sum(rows.running for rows in self._rows.values())

    def encode(self, prompt: str | list[int]) -> list[int]:
        """Return the token ids of a prompt that is no chat."""
        if isinstance(self._generator, ApiError):  # set by `end`
            raise self._generator
        return self._generator.encode(prompt)

    def check_length(self, tokens: int, field: str) -> None:
        """Raise if a prompt is too long.

        Clients recognize the words of this error, and then shorten the history.
        """
        longest = self._limits.prompt_tokens or sys.maxsize
        most = min(longest, self.longest - 1)  # room for a token of the answer
        if tokens <= most:
            return
        option = "max-prompt-tokens" if most == longest else "max-model-len"
        more = f", or start the server with a larger --{option}"
        if most == self._positions - 1:
            more = f": the model has a table of {self._positions} positions"
        raise invalid(
            f"prompt is too long: {tokens} tokens > {most} maximum. Shorten it{more}.",
            field,
            code="context_length_exceeded",
        )

    def insert(self, job: Job) -> None:
        """Give a request a row."""
        request = job.request
        draft = request.draft
        if draft is None and request.options.get("prediction") and self._drafts_nothing:
            draft = "lookup"
        rows = self._serving(draft, request.exact)
        chat = request.chat
        if chat is None or not chat.images:
            ids = job.prompt
            if not isinstance(request.prompt, list):  # the prompt is text
                ids = rows.generator.replayed(ids)
            rows.insert(job, ids, len(ids))
        else:
            model: Any = rows.generator.model
            messages, args = self.template.with_images(chat)
            try:
                prompt = model.image_prompt(messages, chat.images, args)
            except Exception as error:  # a template may raise any error
                raise refused(error) from error
            self.check_length(len(prompt.tokens), "messages")
            rows.insert(job, prompt, len(prompt.tokens))

    def round(self) -> None:
        """Run a round of all rows."""
        for rows in tuple(self._rows.values()):
            rows.round()

    def end(self, why: ApiError) -> None:
        """End all rows, and free the arrays of this thread."""
        for rows in self._rows.values():
            rows.end(why)
        self._rows.clear()
        self._generator = why
        gc.collect()

    def _serving(self, draft: str | None, exact: bool) -> Rows:
        """Return the rows of a draft, in exact mode or not, made at their first use."""
        generator = self._rows[None, False].generator
        if generator.exact is not None:
            exact = False  # every generator is in exact mode
        if (draft, exact) not in self._rows:
            made = _beside(generator, draft, exact, self._prefixes)
            self._rows[draft, exact] = self._rows_of(made)
        return self._rows[draft, exact]


def _beside(
    generator: SpeculativeGenerator,
    draft: str | None,
    exact: bool,
    prefixes: "PrefixCache | None",
) -> SpeculativeGenerator:
    """Return a generator of the same target, with another draft or mode.

    It shares the prefix cache, unless the cache also holds caches of a draft model, or
    this is exact mode: forwards of another shape have computed what the cache holds.

    Raises:
        ApiError: the target cannot be decoded in exact mode.
    """
    options: GeneratorKeywords = {
        "draft": generator.draft if draft is None else draft,
        "draft_length": generator.draft_length if draft is None else None,
        "exact": exact or generator.exact or False,
    }
    make = partial(SpeculativeGenerator, generator.model, generator.tokenizer)
    if not exact:
        shared: GeneratorKeywords = {**options, "prefix_cache": prefixes}
        with suppress(InvalidRequestError):
            return make(**shared)
        return make(**options)
    try:
        return make(**options)
    except SpeculationError as error:
        raise invalid(str(error), "speculative.exact") from error

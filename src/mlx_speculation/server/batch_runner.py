"""Decoding of jobs with one generator: jobs become rows, and get pieces of text."""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

from mlx_speculation.engine import Chunk, Result, SpeculativeGenerator
from mlx_speculation.engine.batch.generator import BatchGenerator
from mlx_speculation.engine.batch.results import BatchResponse
from mlx_speculation.engine.detokenizer import TextDetokenizer
from mlx_speculation.engine.mlx_lm_compat.prompt_cache import limited
from mlx_speculation.engine.options import StreamKeywords
from mlx_speculation.engine.prompt import Prompt
from mlx_speculation.models import position_table
from mlx_speculation.server.api_errors import LOG, ApiError, as_api_error, invalid
from mlx_speculation.server.config import Settings
from mlx_speculation.server.job import Job, Piece, Token
from mlx_speculation.server.metrics import Metrics


class Rows:
    """A batch, and the job of each of its rows."""

    def __init__(
        self,
        generator: SpeculativeGenerator,
        settings: Settings,
        metrics: Metrics,
        done: Callable[[], None],
    ) -> None:
        self.generator = generator
        self._settings, self._metrics, self._done = settings, metrics, done
        length = settings.limits.model_len or generator.context_length or sys.maxsize
        self._positions = position_table(generator.model) or sys.maxsize
        # The most tokens of a prompt and its text together
        self.longest = min(length, self._positions)
        members = () if generator.draft is None else generator.draft.members()
        # Whether a lookup is among the drafters; no other drafter uses a prediction.
        self._predicts = any(each.free for each in members)
        self._kv = settings.kv.limits()
        limited(generator.model, sys.maxsize, **self._kv)  # raises for invalid limits
        self._make = partial(BatchGenerator, generator, max_rows=settings.max_rows)
        self._batch = self._make()
        self._jobs: dict[int, Job] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def check_length(self, tokens: int, field: str) -> None:
        """Raise if a prompt is too long; clients recognize the words of the error."""
        longest = self._settings.limits.prompt_tokens or sys.maxsize
        most = min(longest, self.longest - 1)  # room for a token of the answer
        if tokens <= most:
            return
        option = "max-prompt-tokens" if most == longest else "max-model-len"
        more = f", or start the server with a larger --{option}"
        if most == self._positions - 1:
            more = f": the model has a table of {self._positions} positions"
        elif most != longest and not self._settings.limits.model_len:
            more = f": the model was made for {self.longest} tokens"
        raise invalid(
            f"prompt is too long: {tokens} tokens > {most} maximum. Shorten it{more}.",
            field,
            code="context_length_exceeded",
        )

    @property
    def running(self) -> int:
        """The number of rows that have begun."""
        return len(self._batch.running)

    def insert(self, job: Job, prompt: Prompt, length: int) -> None:
        """Insert a request, whose prompt has `length` tokens."""
        uid = self._batch.insert(prompt, **self._options(job, length))
        self._jobs[uid] = job
        if "logprobs" in job.request.options:
            job.texts = TokenTexts(self.generator.tokenizer)
        job.prompt_tokens = length
        others = len(self._jobs) - 1
        LOG.info("a prompt of %d tokens arrives beside %d texts", length, others)
        job.alone = self._batch.why_alone(uid)
        if job.alone is not None:
            self._metrics.add("rows_alone", job.alone)

    def round(self) -> None:
        """Remove cancelled and late requests, and run a round of the rest.

        An error ends all requests, and a new batch is made.
        """
        try:
            for uid, job in tuple(self._jobs.items()):
                if job.cancelled:
                    self._metrics.add("requests_cancelled")
                elif error := job.late:
                    job.put(error)
                else:
                    continue
                self._let_go(uid)
            responses = self._batch.next() if self._jobs else ()
            for uid, group in groupby(responses, lambda one: one.uid):
                self._hand_out(uid, [*group])
        except Exception as error:
            self.end(as_api_error(error))
            self._batch = self._make()

    def end(self, why: ApiError) -> None:
        """End all requests."""
        for job in self._jobs.values():
            job.put(why)
            self._done()
        self._jobs.clear()
        self._batch.close()

    def _options(self, job: Job, length: int) -> StreamKeywords:
        tokenizer, sampling = self.generator.tokenizer, job.sampling
        if sampling.xtc_probability:
            line = tokenizer.encode("\n", add_special_tokens=False)
            ends = [int(token) for token in (*line, *tokenizer.eos_token_ids)]
            sampling = replace(sampling, xtc_special_tokens=ends)
        options = job.request.options.copy()
        if not self._predicts:
            options.pop("prediction", None)
        drafted, fixed = options.get("draft_length"), self.generator.draft_length
        if isinstance(drafted, int) and fixed is not None:
            options["draft_length"] = min(drafted, fixed)
        room = self.longest - length
        options["max_tokens"] = min(options.get("max_tokens", room), room)
        reach = length + options["max_tokens"]
        caches, quantization = limited(self.generator.model, reach, **self._kv)
        return {
            **options,
            "sampling": sampling,
            "constraint": job.constraint,
            "prefill_step_size": self._settings.prefill_step,
            "prompt_progress": job.count_prefill,
            "prompt_cache": caches.target,
            "kv_quantization": quantization,
        }

    def _hand_out(self, uid: int, responses: list[BatchResponse]) -> None:
        job, last = self._jobs[uid], responses[-1]
        if job.began is None:
            job.began = time.monotonic()
            self._metrics.began(job.began - job.arrived)
        chunks = [one.chunk for one in responses if one.chunk is not None]
        pieces = tuple(chunk.text for chunk in chunks)
        tokens = () if job.texts is None else tuple(map(job.texts.token, chunks))
        result = None if last.finish_reason is None else self._let_go(uid)
        if last.error is not None:
            job.put(as_api_error(last.error))
        else:
            job.put(Piece(pieces, tokens, result))

    def _let_go(self, uid: int) -> Result:
        """Remove a row, count it in the metrics, and return its result."""
        result = self._batch.remove(uid)
        job = self._jobs.pop(uid)
        self._done()
        read = job.prompt_tokens if job.began is not None else 0
        self._metrics.ended(result, read, time.monotonic() - job.arrived)
        LOG.info("%s", _line(job, result))
        return result


class TokenTexts:
    """The texts of a row's tokens, with their probabilities."""

    def __init__(self, tokenizer: Any) -> None:
        self._text = TextDetokenizer(tokenizer, (), ())
        self._length = 0  # characters so far

    def token(self, chunk: Chunk) -> Token:
        """Return the next token of the row, with its text and alternatives."""
        assert chunk.logprob is not None
        shown = ((chunk.token, chunk.logprob.value), *chunk.logprob.top)
        places = self._text.next_texts([token for token, _ in shown])
        start = self._length + places[0][0]
        self._length += len(self._text.add(chunk.token)[0])
        pairs = zip(shown, places, strict=True)
        chosen, *top = (Token(one, text, value) for (one, value), (_, text) in pairs)
        return replace(chosen, top=tuple(top), start=start)


def _line(job: Job, result: Result) -> str:
    stats, now = result.stats, time.monotonic()
    began = job.began or now
    queued = (job.reading or began) - job.arrived
    sources = ", ".join(
        f"{name} {counts.accepted}/{counts.drafted}"
        for name, counts in stats.sources.items()
    )
    # If a text ended during its prefill, only a part of its prompt was read.
    whole = max(0, job.prompt_tokens - stats.reused)
    read = whole if job.began else min(job.read, whole)
    paused = f"; drafting paused: {stats.paused}" if stats.paused else ""
    alone = "" if job.alone is None else f"; alone: {job.alone}"
    return (
        f"prompt {job.prompt_tokens}, reused {stats.reused}, read {read}; "
        f"text {len(result.tokens)} ({result.finish_reason}), drafted {stats.drafted}, "
        f"accepted {stats.accepted} ({sources or 'no drafts'}); "
        f"queued {queued:.2f} s, prefill {began - job.arrived - queued:.2f} s, "
        f"decode {now - began:.2f} s{paused}{alone}"
    )

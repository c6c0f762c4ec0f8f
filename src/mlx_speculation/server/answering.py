"""Answers: the engine generates a request's texts, and an API's `Face` formats them."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from starlette.requests import empty_receive
from starlette.responses import Response, StreamingResponse
from starlette.types import Send

from mlx_speculation.models.vision import VisionTarget
from mlx_speculation.server.answer_parts import (
    NORMAL,
    REASONING,
    AnswerParser,
    joined,
    read_calls,
)
from mlx_speculation.server.api_errors import as_api_error, invalid, unavailable
from mlx_speculation.server.apis.base import Face
from mlx_speculation.server.config import Settings
from mlx_speculation.server.engine_thread import Worker
from mlx_speculation.server.job import Job, Piece
from mlx_speculation.server.metrics import Metrics
from mlx_speculation.server.request.images import opened
from mlx_speculation.server.request.options import TextOptions
from mlx_speculation.server.schemas.constraint import AfterThinking, call_grammar

T = TypeVar("T")
POLL_SECONDS = 0.1
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # of streams
# Seconds of silence after which a stream sends a keep-alive.
KEEP_ALIVE_SECONDS = 5.0
# Largest share of max_tokens for thinking, if the text has to fit a schema.
THINKING_SHARE = 0.5


class Answering:
    """Answers the requests of all APIs."""

    def __init__(self, worker: Worker, settings: Settings, metrics: Metrics) -> None:
        self._worker, self._metrics = worker, metrics
        self._template = worker.template
        self._tokenizer = tokenizer = worker.main.generator.tokenizer
        self._token_ids = 1 + max(tokenizer.get_vocab().values(), default=0)
        reads_images = isinstance(worker.main.generator.model, VisionTarget)
        self._settings = replace(settings, reads_images=reads_images)

    async def answer(self, kind: type[Face], body: TextOptions) -> Response:
        """Return the answer to a request with this body; a face formats it."""
        make = partial(kind, body, self._settings)
        # The count of cancelled texts if the client leaves before `make` has its own
        texts = min(getattr(body, "n", 1), self._settings.max_rows)
        return Answer(partial(self._send, make, texts))

    async def count(self, body: TextOptions) -> int:
        """Return the number of tokens of a chat's prompt, without the engine."""

        def counted() -> int:
            chat = body.request(self._settings).chat
            assert chat is not None
            return len(self._template.rendered(chat))

        return await self._in_thread(counted)

    async def _in_thread(self, act: Callable[[], T]) -> T:
        """Return the result of a slow call in a daemon thread; raise only ApiErrors."""
        outcome: Future[T] = Future()

        def run() -> None:
            try:
                outcome.set_result(act())
            except BaseException as error:
                outcome.set_exception(as_api_error(error))

        threading.Thread(target=run, daemon=True).start()
        result = asyncio.wrap_future(outcome)
        # asyncio logs errors that nobody reads, such as those of clients that left.
        result.add_done_callback(lambda it: it.exception())
        while True:
            self._worker.check_alive()
            if (await asyncio.wait([result], timeout=POLL_SECONDS))[0]:
                return result.result()

    async def _send(self, make: Callable[[], Face], count: int, send: Send) -> None:
        jobs = list[Job]()
        with ExitStack() as stack:
            try:
                face = await self._in_thread(make)  # it may fetch images
                request = face.request
                count = request.count * max(1, len(request.prompts))
                for index in range(count):
                    job = Job(request, self._settings.limits.seconds, index)
                    await self._submit(job, stack)
                    jobs.append(job)
            except asyncio.CancelledError:
                self._metrics.add("requests_cancelled", count=count - len(jobs))
                raise
            while await jobs[0].next(POLL_SECONDS, self._worker.check_alive) is None:
                pass
            events = self._events(face, jobs)
            if request.stream:
                stream = self._stream(face, events)
                response = StreamingResponse(stream, 200, HEADERS, "text/event-stream")
                await response.stream_response(send)
                return
            async for _ in events:
                pass
        whole = Response(json.dumps(face.answer), media_type="application/json")
        await whole({"type": "http"}, empty_receive, send)

    async def _submit(self, job: Job, stack: ExitStack) -> None:
        """Prepare and submit one text; closing `stack` cancels the text."""
        self._worker.take()
        stack.callback(job.cancel)
        try:
            await self._in_thread(partial(self._prepare, job, stack))
        except BaseException:
            self._worker.done()
            raise
        self._worker.arrived.put(job)

    def _prepare(self, job: Job, stack: ExitStack) -> None:
        request, chat, template = job.request, job.request.chat, self._template
        state, machine, known = NORMAL, None, tuple[dict[str, Any], ...]()
        if chat is None:
            job.prompt = self._worker.main.generator.encode(job.given)
        else:
            tokens = template.rendered(chat)
            state, known = template.state_after(tokens), (*chat.tools, *chat.deferred)
            machine = template.machine(bool(known))
            job.images = opened(chat.images, self._settings)
            if not job.images:
                job.prompt = tokens
        field = "messages" if chat else "prompt"
        self._worker.main.check_length(len(job.prompt), field)
        read = partial(read_calls, parser=template.tool_parser, tools=known)
        most = request.most_calls
        job.parser = AnswerParser(machine, state, read=read, most_calls=most)
        job.constraint = self._constraint(job, state, stack)

    def _constraint(self, job: Job, state: str, stack: ExitStack) -> Any:
        """Return the constraint of a text and its thinking; None: no constraint."""
        request, worker, tokenizer = job.request, self._worker, self._tokenizer
        wanted: Any = request.schema
        field = "thinking" if wanted is None else "response_format"
        if request.calls is not None:
            field = "tool_choice"
            parser, marks = self._template.tool_parser, self._template.call_marks
            wanted = call_grammar(request.calls, tokenizer, parser, marks)
        inner = None
        if wanted is not None:

            def check() -> None:
                worker.check_alive()
                if job.cancelled:
                    raise unavailable("The client went away.")
                if job.late:
                    raise job.late

            inner = worker.schemas.compile(wanted, tokenizer, check)
            stack.callback(inner.close)
            if job.cancelled:  # the stack may have closed before the callback was added
                inner.close()
        if state != REASONING:
            return inner
        budget = request.thinking_budget
        if inner is not None and "max_tokens" in request.options:
            most = max(1, int(request.options["max_tokens"] * THINKING_SHARE))
            budget = most if budget is None else min(budget, most)
        if inner is None and budget is None:
            return None
        mark = tokenizer.think_end_tokens
        if not mark:
            raise invalid(
                "The model thinks before it answers, and its tokenizer has no mark for "
                "the end of thinking. Switch thinking off.",
                field,
            )
        return AfterThinking(mark, self._token_ids, inner=inner, budget=budget)

    async def _stream(
        self, face: Face, events: AsyncIterator[bytes]
    ) -> AsyncIterator[bytes]:
        """Yield events, keep-alives, and an error if the answer fails."""
        sent = time.monotonic()
        try:
            async for data in events:
                if data:
                    yield data
                    sent = time.monotonic()
                if time.monotonic() - sent > KEEP_ALIVE_SECONDS:
                    face.keep_alive()
                    yield face.taken()
                    sent = time.monotonic()
        except Exception as error:
            answer = as_api_error(error)
            self._metrics.add("requests_refused", answer.status)
            face.failed(answer)
            yield face.taken()

    async def _events(self, face: Face, jobs: Sequence[Job]) -> AsyncIterator[bytes]:
        """Yield the events of an answer; empty bytes: nothing new."""
        for choice, job in enumerate(jobs):
            face.open(choice, job.prompt_tokens)
            parser, event = job.parser, None
            while not isinstance(event, Piece) or event.result is None:
                yield face.taken()
                event = await job.next(POLL_SECONDS, self._worker.check_alive)
                if not isinstance(event, Piece):
                    if event:
                        face.reading(event, job.prompt_tokens)
                    continue
                parts = [part for text in event.texts for part in parser.feed(text)]
                if event.result is not None:
                    parts += parser.end()
                face.parts(choice, joined(parts), event.tokens)
            job.result = event.result
            job.stop_text = self._stop_text(job, job.result.tokens)
            face.end_text(choice, job)
        face.close()
        yield face.taken()

    def _stop_text(self, job: Job, tokens: list[int]) -> str | None:
        """Return the stop text that has ended a text; None: no stop text has."""
        stops, tokenizer = job.request.options.get("stop"), self._tokenizer
        if not stops or not tokens or tokens[-1] in tokenizer.eos_token_ids:
            return None
        text = tokenizer.decode(tokens)
        return min((one for one in stops if one in text), key=text.find, default=None)


class Answer(StreamingResponse):
    """An answer that is made while it is sent, and cancelled if its client leaves."""

    def __init__(self, act: Callable[[Send], Awaitable[None]]) -> None:
        super().__init__(())
        self._act = act

    async def stream_response(self, send: Send) -> None:
        """Make the answer."""
        await self._act(send)

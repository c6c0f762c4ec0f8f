"""Routes of all paths, with the body models that OpenAPI shows."""

from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from mlx_speculation import __version__
from mlx_speculation.server.answering import Answering
from mlx_speculation.server.api_errors import LOG, ApiError, as_api_error
from mlx_speculation.server.apis.chat_completions import ChatBody, ChatFace
from mlx_speculation.server.apis.messages import CountBody, MessagesBody, MessagesFace
from mlx_speculation.server.apis.openai import (
    FINGERPRINT,
    CompletionBody,
    CompletionFace,
)
from mlx_speculation.server.apis.responses import ResponsesBody, ResponsesFace
from mlx_speculation.server.config import Settings
from mlx_speculation.server.engine_thread import Worker
from mlx_speculation.server.http_protocol import Gate
from mlx_speculation.server.metrics import Metrics
from mlx_speculation.server.request.models import as_invalid, parsed
from mlx_speculation.server.request.options import check_model

POSTED = (
    *("/v1/chat/completions", "/chat/completions", "/v1/completions"),
    *("/v1/messages", "/v1/messages/count_tokens", "/v1/responses"),
)
OTHERS = ("/v1/models", "/health", "/metrics", "/docs", "/openapi.json")
WELCOME = {
    "server": FINGERPRINT,
    "api": "OpenAI's Chat Completions, Responses and completions; Anthropic's Messages",
    "paths": [POSTED[0], *POSTED[2:], *OTHERS],
}
FAILURES = (ApiError, HTTPException, RequestValidationError, Exception)


class JsonRequest(Request):
    """A request whose JSON is parsed with limits."""

    async def json(self) -> Any:
        """Return the object that the body holds; see `parsed`."""
        return parsed(await self.body())


class JsonRoute(APIRoute):
    """A route that parses bodies with limits; FastAPI's own route has none."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, called with a `JsonRequest`."""
        handle = super().get_route_handler()

        async def handle_json(http: Request) -> Response:
            return await handle(JsonRequest(http.scope, http.receive))

        return handle_json


class Api:
    """The routes and their state, for a `worker` that has loaded its models."""

    def __init__(self, worker: Worker, settings: Settings, metrics: Metrics) -> None:
        self._worker, self._settings, self._metrics = worker, settings, metrics
        self._answering = Answering(worker, settings, metrics)
        name, created = settings.names[0], datetime.now(UTC).replace(microsecond=0)
        self._model = {
            "id": name,
            "object": "model",
            "type": "model",
            "display_name": name,
            "created": int(created.timestamp()),
            "created_at": created.isoformat(),
            "owned_by": "mlx-speculation",
        }

    def app(self) -> ASGIApp:
        """Return the app within its middleware."""
        app = FastAPI(
            title="mlx-speculation",
            version=__version__,
            redoc_url=None,
            exception_handlers=dict.fromkeys(FAILURES, self._failed),
            redirect_slashes=False,
        )
        app.router.route_class = JsonRoute
        self._add_posted(app)
        self._add_gotten(app)
        gate: ASGIApp = Gate(app, self._settings, self._metrics)
        if self._settings.allowed_origins:
            gate = CORSMiddleware(
                gate,
                allow_origins=self._settings.allowed_origins,
                allow_methods=["*"],
                allow_headers=["*"],
            )
        return gate

    def _add_posted(self, app: FastAPI) -> None:
        answer = self._answering.answer

        async def chat(body: ChatBody) -> Response:
            """Answer a chat, rendered by the tokenizer's template."""
            return await answer(ChatFace, body)

        async def text(body: CompletionBody) -> Response:
            """Continue a text, or a list of token ids."""
            return await answer(CompletionFace, body)

        async def messages(body: MessagesBody) -> Response:
            """Answer in Anthropic's Messages API."""
            return await answer(MessagesFace, body)

        async def count(body: CountBody) -> dict[str, int]:
            """Count the tokens of a prompt."""
            return {"input_tokens": await self._answering.count(body)}

        async def responses(body: ResponsesBody) -> Response:
            """Answer in OpenAI's Responses API, which stores nothing here."""
            return await answer(ResponsesFace, body)

        handlers: list[Any] = [chat, chat, text, messages, count, responses]
        for path, handler in zip(POSTED, handlers, strict=True):
            app.add_api_route(path, handler, methods=["POST"], response_model=None)

    def _add_gotten(self, app: FastAPI) -> None:
        @app.get("/")
        @app.head("/", include_in_schema=False)
        @app.head("/api/hello", include_in_schema=False)
        async def welcome() -> dict[str, Any]:
            """Describe the server."""
            return WELCOME

        @app.get("/health")
        async def health() -> Response:
            """Return the health of the engine."""
            ready = self._worker.closed is None
            status = "ok" if ready else "unavailable"
            return JSONResponse({"status": status}, 200 if ready else 503)

        @app.get("/metrics")
        async def metrics() -> Response:
            """Return all counts, for Prometheus."""
            page, kind = self._metrics.page()
            return Response(page, headers={"Content-Type": kind})

        @app.get("/v1/models")
        async def models() -> dict[str, Any]:
            """List the model, for OpenAI's and Anthropic's clients."""
            name = self._model["id"]
            ends = {"first_id": name, "last_id": name, "has_more": False}
            return {"object": "list", "data": [self._model], **ends}

        # A name may hold a slash, as those of repositories do.
        @app.get("/v1/models/{name:path}")
        async def model(name: str) -> dict[str, Any]:
            """Describe one model."""
            check_model(name, self._settings)
            return self._model

    async def _failed(self, http: Request, error: Any) -> Response:
        answer = _as_error(http, error)
        self._metrics.add("requests_refused", answer.status)
        path = http.url.path
        said = answer.message[:200]  # shown as in Python, without line breaks
        LOG.info("refused: %s %r: %d %r", http.method, path, answer.status, said)
        return JSONResponse(
            answer.body_for(path), answer.status, headers=answer.headers
        )


def _as_error(http: Request, error: Any) -> ApiError:
    if isinstance(error, RequestValidationError):
        return as_invalid(error.errors(), error.body)
    if not isinstance(error, HTTPException):
        return as_api_error(error)
    if isinstance(error.__cause__, ApiError):  # raised while FastAPI read the body
        return error.__cause__
    method, path = http.method, http.url.path[:200]
    if error.status_code == 404:
        text = f"There is no {method} {path!r} here. GET / lists the paths."
        return ApiError(404, text, code="no_path")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow")
        json = " with a JSON object" if allowed == "POST" else ""
        text = f"{path!r} does not accept {method}. Send a {allowed}{json}."
        return ApiError(405, text, code="no_method")
    return ApiError(error.status_code, str(error.detail))

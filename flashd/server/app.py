"""The HTTP API over the socket."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from flashd import __version__, kernels
from flashd.errors import FlashdError, InternalError, RequestError
from flashd.metrics.exporter import CONTENT_TYPE, Exporter, ModelView
from flashd.runtime.background import in_thread
from flashd.runtime.build import Runtime
from flashd.runtime.session import Session
from flashd.runtime.tokenizer import Tokenizer
from flashd.server.answer import Answer, error_body
from flashd.server.limits import BodyLimit
from flashd.server.schemas import ChatRequest, CompletionRequest
from flashd.stats import ServerStats, SparseStats

# OpenAI's own default for the older endpoint; chat answers run to their end.
COMPLETION_MAX_TOKENS = 16
TEMPLATE_TIMEOUT_S = 10.0
_HTTP_CODES = {
    400: "invalid_json",
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_long",
}
_NO_TOKENIZER = (
    "this model has no tokenizer: send token ids to /v1/completions, or convert the model again "
    "with --tokenizer tokenizer.json"
)


class AppState:
    """What the handlers share. ``runtime`` is ``None`` until the model is loaded."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.runtime: Runtime | None = None
        self.started_unix_s = int(time.time())
        self.stats = ServerStats()
        self.exporter = Exporter(self.stats, _build_info)

    def attach(self, runtime: Runtime) -> None:
        """The model is loaded: serve it."""
        manifest = runtime.manifest
        info = {
            "name": self.model_name,
            "family": manifest.model.family,
            "dtype": manifest.dtype,
            "store": runtime.store.name,
        }
        sparse = runtime.ffn.source.sparse
        view = ModelView(
            runtime.engine.stats,
            runtime.store.stats,
            SparseStats() if sparse is None else sparse.stats,
            runtime.memory.stats,
            runtime.resident_bytes,
            info,
        )
        self.exporter.attach(view)
        self.runtime = runtime

    def ready(self) -> Runtime:
        """The loaded model, or a 503."""
        if self.runtime is None:
            raise RequestError("the model is still loading; try again", code="loading", status=503)
        return self.runtime

    def check_model(self, name: str | None) -> None:
        """Refuse a request for another model."""
        if name is not None and name != self.model_name:
            raise RequestError(
                f"no model {name!r} here; this daemon serves {self.model_name!r}",
                code="model_not_found",
                param="model",
                status=404,
            )


def _build_info() -> dict[str, str]:
    level = kernels.simd_level()
    return {"version": __version__, "native": str(kernels.NATIVE).lower(), "simd": level}


def create_app(state: AppState) -> FastAPI:
    """The application; handlers read ``state`` at every request."""
    app = FastAPI(title="flashd", version=__version__, description=__doc__)
    app.state.flashd = state
    app.add_middleware(BodyLimit)
    _add_errors(app, state)
    _add_facts(app, state)

    @app.post("/v1/completions", tags=["generation"])
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a text or a list of token ids."""
        runtime = state.ready()
        state.check_model(body.model)
        prompt = body.prompt
        if isinstance(prompt, str):
            if runtime.tokenizer is None:
                raise RequestError(_NO_TOKENIZER, param="prompt", code="no_tokenizer")
            _check_length(len(prompt), runtime, runtime.tokenizer, "prompt")
            # A text of some hundred kilobytes takes long enough to be noticed by other requests.
            ids = await in_thread(runtime.tokenizer.encode, prompt) if prompt else []
        else:
            ids = [int(token) for token in prompt if isinstance(token, int)]
        session = runtime.engine.submit(ids, body.sampling(COMPLETION_MAX_TOKENS))
        return await _reply(state, body, session, request, chat=False)

    @app.post("/v1/chat/completions", tags=["generation"])
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        runtime = state.ready()
        state.check_model(body.model)
        if runtime.tokenizer is None:
            raise RequestError(_NO_TOKENIZER, param="messages", code="no_tokenizer")
        messages = [message.plain() for message in body.messages]
        chars = sum(len(message["content"]) for message in messages)
        _check_length(chars, runtime, runtime.tokenizer, "messages")
        try:
            async with asyncio.timeout(TEMPLATE_TIMEOUT_S):
                ids = await in_thread(runtime.tokenizer.encode_chat, messages)
        except TimeoutError as exc:
            raise RequestError(
                f"the model's chat template took more than {TEMPLATE_TIMEOUT_S:.0f} s on these messages",
                param="messages",
            ) from exc
        session = runtime.engine.submit(ids, body.sampling(None))
        return await _reply(state, body, session, request, chat=True)

    return app


def _check_length(chars: int, runtime: Runtime, tokenizer: Tokenizer, param: str) -> None:
    """Refuse a text that can't fit before anybody spends minutes on tokenizing it."""
    context = runtime.manifest.model.max_context
    if chars > context * tokenizer.longest_token_chars:
        raise RequestError(
            f"a prompt of {chars} characters cannot fit into the model's context of {context} tokens",
            code="context_length_exceeded",
            param=param,
        )


async def _reply(
    state: AppState,
    body: CompletionRequest | ChatRequest,
    session: Session,
    request: Request,
    *,
    chat: bool,
) -> Response:
    options = body.stream_options
    answer = Answer(
        session,
        state.model_name,
        chat,
        return_tokens=bool(body.return_tokens),
        include_usage=bool(options and options.include_usage),
    )
    if body.stream:
        return _EventStream(answer)
    watcher = asyncio.create_task(_cancel_when_gone(request, session))
    try:
        return JSONResponse(await answer.whole())
    finally:
        session.cancel()
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher


class _EventStream(StreamingResponse):
    """Server-sent events of one answer; a client that has gone takes the sequence with it."""

    def __init__(self, answer: Answer) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(answer.events(), media_type="text/event-stream", headers=headers)
        self._session = answer.session

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # The generator's own cleanup doesn't run when it was never started.
            self._session.cancel()


async def _cancel_when_gone(request: Request, session: Session) -> None:
    """End a sequence whose client has hung up before the answer was whole."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    session.cancel()
    session.fail(RequestError("the client has gone", code="client_gone", status=499), "cancelled")


def _add_facts(app: FastAPI, state: AppState) -> None:
    @app.get("/health", tags=["facts"])
    async def health() -> JSONResponse:
        """200 once the model is loaded, 503 before."""
        loaded = state.runtime is not None
        return JSONResponse({"status": "ok" if loaded else "loading"}, 200 if loaded else 503)

    @app.get("/v1/models", tags=["facts"])
    async def models() -> dict[str, Any]:
        """The one model that this daemon serves."""
        return {"object": "list", "data": [_model(state)]}

    @app.get("/v1/models/{name:path}", tags=["facts"])
    async def model(name: str) -> dict[str, Any]:
        """One model by id."""
        state.check_model(name)
        return _model(state)

    @app.get("/metrics", tags=["facts"], response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus text format."""
        return Response(state.exporter.text(), media_type=CONTENT_TYPE)


def _invalid(problem: dict[str, Any]) -> RequestError:
    """One line about the first thing that is wrong with a request body."""
    kind = problem["type"]
    if kind == "json_invalid":
        position = problem["loc"][-1]
        return RequestError(f"the body is not valid JSON (at byte {position})", code="invalid_json")
    where = [str(part) for part in problem["loc"] if part != "body"]
    if not where:
        return RequestError(
            "the body is no JSON object; send one, with the header Content-Type: application/json"
        )
    if kind == "extra_forbidden":
        return RequestError(f"{where[0]}: unsupported parameter", param=where[0])
    # Union members and validators appear in the path; the field's own name is what helps.
    message = str(problem["msg"]).removeprefix("Value error, ")
    return RequestError(f"{where[0]}: {message}", param=where[0])


def _model(state: AppState) -> dict[str, Any]:
    body: dict[str, Any] = {
        "id": state.model_name,
        "object": "model",
        "created": state.started_unix_s,
        "owned_by": "flashd",
    }
    if state.runtime is not None:
        body["max_model_len"] = state.runtime.manifest.model.max_context
    return body


def _add_errors(app: FastAPI, state: AppState) -> None:
    def respond(exc: FlashdError) -> JSONResponse:
        status, body = error_body(exc)
        state.stats.rejected[body["error"]["code"]] += 1
        headers = {"Retry-After": "1"} if status in (429, 503) else None
        return JSONResponse(body, status, headers)

    @app.exception_handler(FlashdError)
    async def flashd_error(_: Request, exc: FlashdError) -> JSONResponse:
        return respond(exc)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, exc: RequestValidationError) -> JSONResponse:
        return respond(_invalid(exc.errors()[0]))

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, exc: HTTPException) -> JSONResponse:
        # A body nested deeper than the parser can follow arrives here, as a 400.
        code = _HTTP_CODES.get(exc.status_code, "invalid_request")
        return respond(RequestError(str(exc.detail), code=code, status=exc.status_code))

    @app.exception_handler(Exception)
    async def unexpected(_: Request, exc: Exception) -> JSONResponse:
        # The traceback goes to the log: the server raises it again after this answer.
        return respond(InternalError(f"internal error: {exc!r}; see the daemon's log"))

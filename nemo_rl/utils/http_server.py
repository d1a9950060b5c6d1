"""Small HTTP servers in a background thread: Prometheus counters, web pages and files of a folder.

Serves any ASGI application with uvicorn. Invariants: slow clients are cut off; requests are not logged; the port is
free again after `close`. A token-protected page shows nothing without the token; links never leave the page's folder; a
report, which contains model output, is sandboxed into an origin of its own.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import quote, urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from nemo_rl.config.errors import UserError
from nemo_rl.utils.files import ADDRESS_FILES

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

PROMETHEUS_TEXT = "text/plain; version=0.0.4"
_REQUEST_S = 10.0
_ANSWER_S = 60.0
_VISITORS = 128
_HEADER_BYTES = 16 << 10
_CLOSE_S = 5.0
NEEDS_TOKEN = "this needs the page's token: open the address that was printed\n"
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_REPORT_POLICY = "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; \
img-src data:; font-src data:"
_MOST_FILES = 1000


class PageError(UserError, RuntimeError):
    """The page cannot be served as asked."""


@dataclass(frozen=True)
class Bounds:
    """What a server grants one visitor, in seconds, and all of them together.

    `request_s`: for the head of a request. `body_s`: for the rest of it. `answer_s`: for making and reading the answer.
    `idle_s`: between two requests. `visitors`: connections; one more takes the place of the oldest that has not sent a
    whole request, and is answered 503 if all are being answered. `head_bytes`: of a request.
    """

    request_s: float
    body_s: float
    answer_s: float
    idle_s: float
    visitors: int
    head_bytes: int = _HEADER_BYTES


class _Waiting:
    """Connections that have not sent a whole request, each group the oldest first."""

    def __init__(self) -> None:
        self.groups: dict[str, dict[_BoundedProtocol, None]] = {"request": {}, "body": {}, "idle": {}}

    def move(self, one: _BoundedProtocol, group: str | None) -> None:
        for name, members in self.groups.items():
            members.pop(one, None)
            if name == group:
                members[one] = None

    def oldest_but(self, one: _BoundedProtocol) -> _BoundedProtocol | None:
        # Visitors that were answered before are the least likely attackers.
        everybody = (other for members in self.groups.values() for other in members)
        return next((other for other in everybody if other is not one), None)


class _BoundedProtocol(H11Protocol):
    """Cuts off visitors who have not sent a whole request in time, or not read its answer: uvicorn waits for them."""

    bounds: Bounds
    waiting: _Waiting

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._state = ""
        self._bound: asyncio.TimerHandle | None = None
        self._enter("request")
        if len(self.connections) > self.bounds.visitors and (oldest := self.waiting.oldest_but(self)) is not None:
            self.waiting.move(oldest, None)
            # uvicorn counts it until the loop comes round, and many may connect before that.
            self.connections.discard(oldest)
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._enter(self._received(began=True))

    def on_response_complete(self) -> None:
        # A next request may have been sent already; uvicorn takes it up here.
        super().on_response_complete()
        self._enter(self._received(began=False))

    def connection_lost(self, exc: Exception | None) -> None:
        self._enter(None)
        super().connection_lost(exc)

    def _received(self, *, began: bool) -> str:
        if self.cycle is None or self.cycle.response_complete:
            return "request" if began else "idle"
        return "body" if self.cycle.more_body else "answer"

    def _enter(self, state: str | None) -> None:
        if state == self._state:
            return
        self._state = state
        self.waiting.move(self, state)
        if self._bound is not None:
            self._bound.cancel()
        if state is not None:
            self._bound = self.loop.call_later(getattr(self.bounds, f"{state}_s"), self.transport.abort)


class BackgroundServer:
    """Serves an ASGI application from a thread.

    Args:
        port: 0 takes a free one.
        listening: A socket that listens already, in the place of `host` and `port`.
        bounds: By default those of a page for people.
        loop: uvicorn's name of the event loop to use.

    Attributes:
        port: The port it listens on.

    Raises OSError: the address cannot be used.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str = "",
        port: int = 0,
        name: str,
        listening: socket.socket | None = None,
        bounds: Bounds | None = None,
        loop: Literal["asyncio", "auto"] = "asyncio",
    ) -> None:
        bounds = bounds or Bounds(_REQUEST_S, _REQUEST_S, _ANSWER_S, _REQUEST_S, _VISITORS)
        if listening is None:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            listening = socket.create_server((host, port), family=family, backlog=bounds.visitors)
        self._socket = listening
        self.port = int(self._socket.getsockname()[1])
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        config = uvicorn.Config(
            app,
            http=type("Bounded", (_BoundedProtocol,), {"bounds": bounds, "waiting": _Waiting()}),
            ws="none",
            loop=loop,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            # Those being answered make no room for others.
            limit_concurrency=2 * bounds.visitors,
            h11_max_incomplete_event_size=bounds.head_bytes,
            timeout_keep_alive=math.ceil(bounds.idle_s) + 1,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._server.run([self._socket])
        except BaseException as error:  # noqa: BLE001 - who waits for the start raises it
            self._failure = error

    def wait_until_started(self, timeout_s: float) -> None:
        """Waits until requests are answered. Raises RuntimeError: the server failed, or takes longer."""
        deadline = time.monotonic() + timeout_s
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start within {timeout_s:.0f} s: {self._failure}")
            time.sleep(0.01)

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Stops serving. Safe to call twice."""
        self._server.should_exit = True
        self._thread.join(timeout=timeout_s)
        self._socket.close()


def shows_token(token: str, shown: Sequence[str]) -> bool:
    """Whether one of the strings is the token; a wrong one does not show how much of it is right."""
    return any(hmac.compare_digest(one.encode(), token.encode()) for one in shown)


def bearer(request: Request) -> str:
    """The token of the request's Authorization header; empty where there is none."""
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


def bearer_only(app: ASGIApp, token: str | None, refusal: Response) -> ASGIApp:
    """The app behind a token that `Authorization: Bearer` must bring; None: open. `refusal` answers the others."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        allowed = token is None or shows_token(token, [bearer(Request(scope))])
        await (app if allowed else refusal)(scope, receive, send)

    return guarded


def metrics_handler(text: Callable[[], str], token: str | None = None) -> ASGIApp:
    """Answers `/metrics`. `text`: gives the current metrics in Prometheus's text format. `token`: what `Authorization:
    Bearer` must bring; None: nothing.
    """

    def metrics(request: Request) -> Response:
        return PlainTextResponse(text(), media_type=PROMETHEUS_TEXT)

    def elsewhere(request: Request) -> Response:
        return PlainTextResponse("see /metrics\n", 404)

    app = Starlette(routes=[Route("/metrics", metrics), Route("/{path:path}", elsewhere)])
    refusal = PlainTextResponse("this needs the header Authorization: Bearer and the token\n", 401)
    return bearer_only(app, token, refusal)


def guarded_app(
    routes: Sequence[Route], known: Callable[[Sequence[str]], bool], *, token_to_read: bool, cookie: str
) -> Starlette:
    """An ASGI application that asks for a token.

    Args:
        routes: Its routes; a 404 names them.
        known: Whether one of some strings is a token that may read: `?token=`, bearer token and cookie; `/?token=` sets
            the cookie.
        token_to_read: Whether reading needs a token; without, any client that addresses this machine by its own name
            may read.
    """

    def elsewhere(request: Request) -> Response:
        known = [route.path for route in routes if "{" not in route.path]
        return PlainTextResponse(f"see {', '.join(known)}\n", 404)

    async def guarded(request: Request, answer: RequestResponseEndpoint) -> Response:
        try:
            host = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
        except ValueError:
            return PlainTextResponse("the Host header is not an address\n", 400)
        asked = request.query_params.get("token", "")
        # A foreign page that has its name resolved to this machine is not this machine's user.
        shown = [asked, bearer(request), request.cookies.get(cookie, "")]
        if not (await run_in_threadpool(known, shown) if token_to_read else of_this_machine(host)):
            return PlainTextResponse(NEEDS_TOKEN, 403, _HEADERS)
        try:
            answered = await answer(request)
        except RuntimeError:
            # Starlette raises this when the visitor has disconnected; there is no one to answer.
            if not await request.is_disconnected():
                raise
            return Response(status_code=499)
        for name, value in _HEADERS.items():
            answered.headers.setdefault(name, value)
        if request.url.path == "/" and await run_in_threadpool(known, [asked]):
            answered.set_cookie(cookie, asked, httponly=True, samesite="strict")
        return answered

    return Starlette(
        routes=[*routes, Route("/{path:path}", elsewhere)],
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=guarded), Middleware(GZipMiddleware, compresslevel=1)],
    )


def serve_page(
    app: Starlette, token: str | None, *, host: str, port: int, name: str, option: str = "--port"
) -> tuple[BackgroundServer, str]:
    """Starts serving; the server, and the page's address with the token, where there is one. `option`: the command's,
    for the port. Raises PageError: the address cannot be listened on.
    """
    try:
        server = BackgroundServer(app, host=host, port=port, name=name)
    except OSError as error:
        raise PageError(
            f"{option} {port}: {host} cannot be listened on ({error.strerror or error}); leave {option} out for a free "
            "port, or name another one"
        ) from error
    shown = f"[{host}]" if ":" in host else host
    return server, f"http://{shown}:{server.port}/" + (f"?token={quote(token)}" if token else "")


def of_this_machine(host: str) -> bool:
    """Whether a host is this machine by a name that no other one has."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def file_of(folder: Path, path: str, begins: str = "") -> Response:
    """A file of a folder or below it. `begins`: how the names in the folder begin that are shown."""
    try:
        # Links lead out of the folder only by a name that a visitor must not choose.
        root = folder.resolve()
        wanted = (root / path).resolve()
        if not wanted.is_relative_to(root) or (wanted != root and not str(wanted.relative_to(root)).startswith(begins)):
            return PlainTextResponse("outside the folder\n", 404)
        if wanted.is_dir():
            shown = [line for line in _listed(wanted) if (wanted / line).relative_to(root).parts[0].startswith(begins)]
            return PlainTextResponse("".join(f"{line}\n" for line in shown[:_MOST_FILES]))
        if not wanted.is_file() or not os.access(wanted, os.R_OK) or wanted.name in ADDRESS_FILES:
            return PlainTextResponse("there is no such file, or it is private\n", 404)
    except (OSError, ValueError, RuntimeError):
        # No file can have such a name.
        return PlainTextResponse("there is no such file\n", 404)
    is_report = wanted.name == "report.html"
    return FileResponse(
        wanted,
        media_type="text/html" if is_report else "text/plain; charset=utf-8",
        headers={"Content-Security-Policy": _REPORT_POLICY} if is_report else None,
    )


def _listed(folder: Path) -> list[str]:
    """Files below a folder, without what links lead to."""
    found = (
        path
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink() and path.name not in ADDRESS_FILES
    )
    return sorted(str(path.relative_to(folder)) for path in found)

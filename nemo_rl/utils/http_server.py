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
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from nemo_rl.config.errors import UserError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

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


class _BoundedProtocol(H11Protocol):
    """Cuts off visitors who have not sent a whole request in time, or not read its answer: uvicorn waits for them."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._bound = self.loop.call_later(_REQUEST_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        waits = self.cycle is None or self.cycle.response_complete
        super().data_received(data)
        if waits and self.cycle is not None and not self.cycle.response_complete:
            self._bound.cancel()
            self._bound = self.loop.call_later(_ANSWER_S, self.transport.abort)

    def on_response_complete(self) -> None:
        self._bound.cancel()
        self._bound = self.loop.call_later(_REQUEST_S, self.transport.abort)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._bound.cancel()
        super().connection_lost(exc)


class BackgroundServer:
    """Serves an ASGI application from a thread. `port`: the port it listens on; 0 takes a free one. Raises OSError: the
    address cannot be used.
    """

    def __init__(self, app: ASGIApp, *, host: str, port: int, name: str) -> None:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._socket = socket.create_server((host, port), family=family, backlog=_VISITORS)
        self.port = int(self._socket.getsockname()[1])
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        config = uvicorn.Config(
            app,
            http=_BoundedProtocol,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=_VISITORS,
            h11_max_incomplete_event_size=_HEADER_BYTES,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops serving. Safe to call twice."""
        self._server.should_exit = True
        self._thread.join(timeout=_CLOSE_S)
        self._socket.close()


def shows_token(token: str, shown: Sequence[str]) -> bool:
    """Whether one of the strings is the token; a wrong one does not show how much of it is right."""
    return any(hmac.compare_digest(one.encode(), token.encode()) for one in shown)


def bearer(request: Request) -> str:
    """The token of the request's Authorization header; empty where there is none."""
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


def metrics_handler(text: Callable[[], str], token: str | None = None) -> Starlette:
    """Answers `/metrics`. `text`: gives the current metrics in Prometheus's text format. `token`: what `Authorization:
    Bearer` must bring; None: nothing.
    """

    def metrics(request: Request) -> Response:
        if token is not None and not shows_token(token, [bearer(request)]):
            return PlainTextResponse("this needs the header Authorization: Bearer and the token\n", 401)
        return PlainTextResponse(text(), media_type=PROMETHEUS_TEXT)

    def elsewhere(request: Request) -> Response:
        return PlainTextResponse("see /metrics\n", 404)

    return Starlette(routes=[Route("/metrics", metrics), Route("/{path:path}", elsewhere)])


def guarded_app(routes: Sequence[Route], token: str, *, token_to_read: bool, cookie: str) -> Starlette:
    """An ASGI application that asks for a token.

    Args:
        routes: Its routes; a 404 names them.
        token: As `?token=`, bearer token or cookie; `/?token=` sets the cookie.
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
        shown = shows_token(token, [asked, bearer(request), request.cookies.get(cookie, "")])
        if not (shown if token_to_read else of_this_machine(host)):
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
        if token_to_read and request.url.path == "/" and shows_token(token, [asked]):
            answered.set_cookie(cookie, token, httponly=True, samesite="strict")
        return answered

    return Starlette(
        routes=[*routes, Route("/{path:path}", elsewhere)],
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=guarded), Middleware(GZipMiddleware, compresslevel=1)],
    )


def serve_page(app: Starlette, token: str | None, *, host: str, port: int, name: str) -> tuple[BackgroundServer, str]:
    """Starts serving; the server, and the page's address with the token, where there is one. Raises PageError: the
    address cannot be listened on.
    """
    try:
        server = BackgroundServer(app, host=host, port=port, name=name)
    except OSError as error:
        raise PageError(f"--port {port}: {host} cannot be listened on ({error.strerror or error})") from error
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


def file_of(folder: Path, path: str) -> Response:
    """A file of a folder or below it."""
    # Links lead out of the folder only by a name that a visitor must not choose.
    wanted = (folder / path).resolve()
    if not wanted.is_relative_to(folder.resolve()):
        return PlainTextResponse("outside the folder\n", 404)
    if wanted.is_dir():
        return PlainTextResponse("".join(f"{line}\n" for line in _listed(wanted)))
    if not wanted.is_file():
        return PlainTextResponse(f"{path}: there is no such file\n", 404)
    is_report = wanted.name == "report.html"
    return FileResponse(
        wanted,
        media_type="text/html" if is_report else "text/plain; charset=utf-8",
        headers={"Content-Security-Policy": _REPORT_POLICY} if is_report else None,
    )


def _listed(folder: Path) -> list[str]:
    """Files below a folder, without what links lead to."""
    found = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sorted(str(path.relative_to(folder)) for path in found)[:_MOST_FILES]

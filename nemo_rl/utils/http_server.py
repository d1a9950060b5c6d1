"""Small HTTP servers in a background thread: Prometheus counters and web pages.

Serves any ASGI application with uvicorn. Invariants: slow clients are cut off; requests are not logged; the port is
free again after `close`.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    from starlette.types import ASGIApp

PROMETHEUS_TEXT = "text/plain; version=0.0.4"
_REQUEST_S = 10.0
_ANSWER_S = 60.0
_VISITORS = 128
_HEADER_BYTES = 16 << 10
_CLOSE_S = 5.0


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

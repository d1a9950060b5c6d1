"""Small HTTP servers that run beside whatever this process does: counters for Prometheus, pages for people.

Knows no page. Invariants: visits are not worth a line each; the port is free again after `close`.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PROMETHEUS_TEXT = "text/plain; version=0.0.4"


class QuietHandler(BaseHTTPRequestHandler):
    """Answers one visit; subclasses have `do_GET`."""

    def answer(
        self, status: int, body: bytes, kind: str = "text/plain", headers: Mapping[str, str] | None = None
    ) -> None:
        """Sends a whole answer.

        Args:
            status: HTTP status.
            body: As it is sent.
            kind: Its content type.
            headers: Further headers.
        """
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


class BackgroundServer:
    """Serves from a thread of its own.

    Args:
        handler: Answers visits.
        host: Address to listen on.
        port: Port; 0 takes a free one.
        name: Of the thread.

    Attributes:
        port: The port that it listens on.

    Raises:
        OSError: The address cannot be listened on.
    """

    def __init__(self, handler: type[QuietHandler], *, host: str, port: int, name: str) -> None:
        self._server = ThreadingHTTPServer((host, port), handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops serving. Safe to call twice."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(timeout=5.0)
        self._server.server_close()


def metrics_handler(text: Callable[[], str], token: str | None = None) -> type[QuietHandler]:
    """Answers `/metrics`.

    Args:
        text: Gives the current metrics in Prometheus's text format.
        token: What `Authorization: Bearer` must bring; None: nothing.
    """

    class Page(QuietHandler):
        def do_GET(self) -> None:
            given = self.headers.get("Authorization", "").encode()
            if token is not None and not hmac.compare_digest(given, f"Bearer {token}".encode()):
                self.answer(401, b"this needs the header Authorization: Bearer and the token\n")
                return
            found = self.path.split("?")[0] == "/metrics"
            self.answer(200 if found else 404, text().encode() if found else b"see /metrics\n", PROMETHEUS_TEXT)

    return Page

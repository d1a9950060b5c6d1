"""A small HTTP endpoint on which Prometheus reads a client's counters.

Serves one page from a thread of its own; knows only the function that makes the text. Invariant: the port is free again
after `close`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class MetricsEndpoint:
    """Serves `/metrics`.

    Args:
        text: Gives the current metrics in Prometheus's text format.
        host: Address to listen on.
        port: Port; 0 takes a free one.

    Attributes:
        address: `host:port`.
    """

    def __init__(self, text: Callable[[], str], host: str = "0.0.0.0", port: int = 0) -> None:
        class Page(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = self.path.split("?")[0] == "/metrics"
                body = text().encode() if found else b"see /metrics\n"
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Scrapes are not worth a line each."""

        self._server = ThreadingHTTPServer((host, port), Page)
        self._server.daemon_threads = True
        self.address = f"{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="data-plane-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops serving. Safe to call twice."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(timeout=5.0)
        self._server.server_close()

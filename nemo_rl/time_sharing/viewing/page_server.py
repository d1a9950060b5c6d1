"""The web page of a pool: who is on which GPU and why, live or from a finished log, and figures for Prometheus.

Reads the scheduler's log and asks for standings; changes nothing. Invariant: from another machine nothing is shown
without the token; the port is free again after `close`.
"""

from __future__ import annotations

import gzip
import hmac
import html
import ipaddress
import json
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from nemo_rl.config.errors import UserError
from nemo_rl.time_sharing.history.check import NothingToCheck, check
from nemo_rl.time_sharing.log.events import LogClosed
from nemo_rl.time_sharing.log.log_tail import LogTail
from nemo_rl.time_sharing.log.merged import merge_by_machine_time
from nemo_rl.time_sharing.viewing.pool_metrics import prometheus_text
from nemo_rl.time_sharing.viewing.report import report_data
from nemo_rl.time_sharing.viewing.report_page import PAGE
from nemo_rl.time_sharing.viewing.standings_table import cells, steps_of
from nemo_rl.time_sharing.viewing.timeline import Timeline, TimelineBuilder
from nemo_rl.utils.http_server import PROMETHEUS_TEXT, BackgroundServer, QuietHandler
from nemo_rl.utils.record import RecordError
from nemo_rl.utils.record_events import StepFinished

if TYPE_CHECKING:
    from nemo_rl.time_sharing.pool import Standing

logger = logging.getLogger(__name__)

_FRESH_S = 1.0
_MOST_BARS = 20_000
_COOKIE = "nrl_pool_token"
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class PageError(UserError, RuntimeError):
    """The page cannot be served as asked."""


class PoolView:
    """What there is to show of one pool, no older than a second.

    Args:
        log_dir: Where its scheduler writes.
        standings: The pool's pipelines; None where only the log is left.
    """

    def __init__(self, log_dir: Path, standings: Callable[[], Sequence[Standing]] | None = None) -> None:
        self._log_dir, self._standings = log_dir, standings
        self._tail, self._builder = LogTail(log_dir / "scheduler.jsonl"), TimelineBuilder()
        self._lock = threading.Lock()
        self._asked = float("-inf")
        self._known: Sequence[Standing] = ()
        self._closed = False
        self._violations: list[Any] | None = None
        self._steps: dict[str, int] = {}

    def _timeline(self) -> Timeline:
        if time.monotonic() - self._asked > _FRESH_S:
            for entry in self._tail.new():
                self._builder.take(entry)
                self._closed = isinstance(entry.event, LogClosed)
            if self._standings is not None:
                self._known = self._standings()
            self._asked = time.monotonic()
        origin = self._builder.timeline.origin
        live = self._standings is not None and not self._closed
        return self._builder.so_far(time.time() - origin if live and origin else None)

    def data(self) -> dict[str, object]:
        """What the page draws."""
        with self._lock:
            timeline = self._timeline()
            if self._closed and self._violations is None:
                self._violations = self._judged()
            timeline.steps = self._steps | {standing.name: steps_of(standing) for standing in self._known}
            data = report_data(timeline, self._violations or [], self._log_dir.resolve().name)
            bars: Any = data["bars"]
            said = "" if self._tail.damage is None else f"the log cannot be read any further: {self._tail.damage}"
            return data | {
                "live": not self._closed,
                "checked": self._violations is not None,
                "bars": bars[-_MOST_BARS:],
                "standings": [cells(standing) for standing in self._known],
                "about": said,
            }

    def _judged(self) -> list[Any]:
        """What the checker finds in all records of the pool, once the log is closed; counts its pipelines' steps."""
        try:
            entries = list(merge_by_machine_time(sorted(self._log_dir.glob("*.jsonl"))))
            done = [entry.source for entry in entries if isinstance(entry.event, StepFinished)]
            self._steps = dict(Counter(source.partition("/")[0] for source in done))
            return list(check(entries, ended=True))
        except (RecordError, NothingToCheck) as error:
            return [error]

    def metrics(self) -> bytes:
        """For Prometheus."""
        with self._lock:
            return prometheus_text(self._timeline(), self._known)


class PageServer:
    """Serves `/`, `/data.json` and `/metrics`.

    Args:
        view: What is shown.
        host: Address to listen on.
        port: Port; 0 takes a free one.
        token: What a visitor must show, as `?token=` or as a bearer token. By default one is made up, unless `host` is
            of this machine alone.

    Attributes:
        url: Where to look, with the token.

    Raises:
        PageError: The address cannot be listened on.
    """

    def __init__(self, view: PoolView, *, host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> None:
        if token is None and not _of_this_machine(host):
            token = secrets.token_urlsafe(16)
        try:
            self._server = BackgroundServer(_handler(view, token), host=host, port=port, name="pool-page")
        except OSError as error:
            raise PageError(f"--port {port}: {host} cannot be listened on ({error.strerror or error})") from error
        shown = f"[{host}]" if ":" in host else host
        query = "" if token is None else f"?token={token}"
        self.url = f"http://{shown}:{self._server.port}/{query}"

    def close(self) -> None:
        """Stops serving. Safe to call twice."""
        self._server.close()


def _of_this_machine(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _handler(view: PoolView, token: str | None) -> type[QuietHandler]:
    class Page(QuietHandler):
        def do_GET(self) -> None:
            address = urlsplit(self.path)
            shown = parse_qs(address.query).get("token", [""])[0]
            if not self._may_look(shown):
                self._page(403, b"this page needs its token: open the address that the pool has printed\n")
            elif address.path == "/":
                data = json.dumps(view.data(), separators=(",", ":")).replace("</", "<\\/")
                title = html.escape("Pool: time-sharing")
                page = PAGE.replace("/*TITLE*/", title).replace("/*DATA*/null", data)
                self._page(200, page.encode(), "text/html; charset=utf-8", cookie=shown if token else "")
            elif address.path == "/data.json":
                body = json.dumps(view.data(), separators=(",", ":")).encode()
                self._page(200, body, "application/json")
            elif address.path == "/metrics":
                self._page(200, view.metrics(), PROMETHEUS_TEXT)
            else:
                self._page(404, b"see /, /data.json and /metrics\n")

        def _may_look(self, shown: str) -> bool:
            if token is None:
                # A foreign page that has its name resolved to this machine is not this machine's user.
                return _of_this_machine(urlsplit(f"//{self.headers.get('Host', '')}").hostname or "")
            given = [shown, self.headers.get("Authorization", "").removeprefix("Bearer ")]
            try:
                cookie = SimpleCookie(self.headers.get("Cookie", "")).get(_COOKIE)
            except CookieError:
                cookie = None
            given += [cookie.value] if cookie is not None else []
            return any(hmac.compare_digest(one.encode(), token.encode()) for one in given)

        def _page(self, status: int, body: bytes, kind: str = "text/plain", *, cookie: str = "") -> None:
            headers = dict(_HEADERS)
            if "gzip" in self.headers.get("Accept-Encoding", ""):
                headers["Content-Encoding"], body = "gzip", gzip.compress(body, 1)
            if cookie:
                headers["Set-Cookie"] = f"{_COOKIE}={cookie}; HttpOnly; SameSite=Strict; Path=/"
            self.answer(status, body, kind, headers)

    return Page

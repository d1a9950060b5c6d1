"""Posts the ends of a pool's jobs to a webhook, in the background.

Invariant: the pool never waits for the webhook, except for a stated time when it closes; every attempt has a deadline,
also where the server answers byte by byte. Redirects are not followed. Messages name the server alone, since the rest
of an address may be a secret.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from nemo_rl.config.errors import first_line

logger = logging.getLogger(__name__)

_PAUSES_S = (0.0, 2.0, 8.0)
_AT_ONCE = 4


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **named: Any) -> None:
        return None


class EndNotices:
    """Posts JSON to one address. `deadline_s`: of one attempt; there are three, some seconds apart.

    Attributes:
        trouble: Why the newest notice did not arrive; empty where it did. Logged when it begins and when it ends.
    """

    def __init__(self, url: str, *, deadline_s: float = 10.0) -> None:
        parts = urlsplit(url)
        self._url, self._server = url, f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")
        self._deadline_s = deadline_s
        self._opener = urllib.request.build_opener(_NoRedirects)
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="end-notices")
        self._open: set[Future[None]] = set()
        self._lock = threading.Lock()
        self.trouble = ""

    def post(self, notice: Mapping[str, object], arrived: Callable[[], None] = lambda: None) -> None:
        """Posts a notice in the background; calls `arrived` when the server has taken it."""
        work = self._threads.submit(self._deliver, json.dumps(notice).encode(), arrived)
        self._open.add(work)
        work.add_done_callback(self._open.discard)

    def settle(self, timeout_s: float) -> bool:
        """Waits until every notice has arrived or was given up; whether that is so in time."""
        return not wait(list(self._open), timeout_s).not_done

    def _deliver(self, body: bytes, arrived: Callable[[], None]) -> None:
        why = ""
        for pause_s in _PAUSES_S:
            time.sleep(pause_s)
            if not (why := self._attempt(body)):
                break
        self._note(f"--on-end {self._server}: {why}; ends of jobs do not arrive there" if why else "")
        if not why:
            arrived()

    def _note(self, trouble: str) -> None:
        with self._lock:
            before, self.trouble = self.trouble, trouble
        if trouble and not before:
            logger.error("event=ends_not_posted %s", trouble)
        elif before and not trouble:
            logger.warning("event=ends_posted_again server=%s", self._server)

    def _attempt(self, body: bytes) -> str:
        """Posts once; why it did not arrive, empty where it did."""
        said = [f"does not answer within {self._deadline_s:g} s"]

        def send() -> None:
            request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"}, method="POST")
            try:
                with self._opener.open(request, timeout=self._deadline_s):
                    said[0] = ""
            except urllib.error.HTTPError as error:
                said[0] = f"answers {error.code} {error.reason}"
            except TimeoutError:
                return
            except (OSError, HTTPException, ValueError) as error:
                reason = getattr(error, "reason", error)
                if not isinstance(reason, TimeoutError):
                    said[0] = first_line(reason) if isinstance(reason, BaseException) else str(reason)

        # A deadline of a socket begins again with each byte.
        thread = threading.Thread(target=send, name="end-notice", daemon=True)
        thread.start()
        thread.join(self._deadline_s)
        return said[0]

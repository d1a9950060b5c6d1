"""Access to Hugging Face's hub: whether it is reachable, and which of its libraries' log lines are shown.

Invariant: a machine without network asks the hub once instead of retrying.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from pathlib import Path
from urllib.parse import urlsplit

OFFLINE = "HF_HUB_OFFLINE"
_ENDPOINT = "https://huggingface.co"
_REACH_S = 4.0
_BARS = ("HF_DATASETS_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_PROGRESS_BARS")
# Each repeats the error that follows.
_REPEATING = ("huggingface_hub.utils._http", "datasets.packaged_modules.json.json", "datasets.packaged_modules.csv.csv")


def calm() -> None:
    """Silences the hub libraries' retries and progress bars; the final error says what failed."""
    if not sys.stderr.isatty():
        for name in _BARS:
            os.environ.setdefault(name, "1")
    for name in _REPEATING:
        logging.getLogger(name).setLevel(logging.CRITICAL)


def use_cache_if_unreachable(model: str) -> str | None:
    """Switches the hub's libraries to their cache, here and in the processes of the run, where a model is not on this
    machine and the hub cannot be reached. `model`: a directory, or a name on the hub. Returns a line for the person, if
    it was switched.
    """
    proxied = any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"))
    if proxied or os.environ.get(OFFLINE) or Path(model).exists():
        return None
    host = urlsplit(os.environ.get("HF_ENDPOINT", _ENDPOINT))
    if _answers(host.hostname or "", host.port or (443 if host.scheme == "https" else 80)):
        return None
    os.environ[OFFLINE] = "1"
    return f"{host.hostname} cannot be reached from here: models and data come from the local cache alone"


def _answers(host: str, port: int) -> bool:
    """Whether the host accepts connections; a failing name lookup counts as no."""
    reached = threading.Event()

    def connect() -> None:
        try:
            with socket.create_connection((host, port), timeout=_REACH_S):
                reached.set()
        except OSError:
            return

    thread = threading.Thread(target=connect, name="hub-probe", daemon=True)
    thread.start()
    thread.join(_REACH_S)
    return reached.is_set()

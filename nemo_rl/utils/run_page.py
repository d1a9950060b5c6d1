"""The live page of a run (`--page`): its state, its report, its newest samples and the end of its logs.

Served on this machine only, with a token; read-only. Invariant: only the owner can read the address file, which is
removed at the end of the run.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from nemo_rl.utils.files import PAGE_ADDRESS, private_file
from nemo_rl.utils.http_server import file_of, guarded_app, serve_page, shows_token
from nemo_rl.utils.progress import RunProgress, format_duration
from nemo_rl.utils.report import sample_lines, write_page
from nemo_rl.utils.text import filled_page, printable

_TEMPLATE = Path(__file__).with_name("run_page.html")
_COOKIE = "nrl_run_token"
_TAIL_BYTES, _TAIL_LINES, _SAMPLES = 16 << 10, 40, 4


class RunPage:
    """The content of the page. `log_dir`: the run's directory, or its parent until that exists. `ended`: final text."""

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        self.ended = ""
        self._progress: RunProgress | None = None

    def follow(self, progress: RunProgress, log_dir: Path) -> None:
        """The run is set up."""
        self._progress, self.log_dir = progress, log_dir

    def data(self) -> dict[str, object]:
        """Data of the page."""
        progress = self._progress
        if progress is None:
            return {
                "title": self.log_dir.name,
                "state": self.ended or "starting",
                "line": "",
                "samples": [],
                "logs": {},
            }
        figures = "".join(f", {name} {value:.3f}" for name, value in progress.newest_figures().items())
        left = progress.seconds_left()
        ahead = f", {format_duration(left)} left" if left and not self.ended else ""
        return {
            "title": f"{progress.title}: {self.log_dir.name}",
            "state": self.ended or progress.current_phase,
            "line": f"step {progress.step} of {progress.total_steps}{figures}{ahead}",
            "samples": self._samples(),
            "logs": self._logs(),
            "report": (self.log_dir / "report.html").is_file() or write_page(self.log_dir) is not None,
        }

    def _samples(self) -> list[dict[str, object]]:
        """The first samples of the newest file of training samples."""
        files = sorted((self.log_dir / "samples").glob("*_data_step*.jsonl"), key=lambda path: path.stat().st_mtime)
        if not files:
            return []
        rows = []
        for row in islice(sample_lines(files[-1]), _SAMPLES):
            content = row.get("content")
            text = "\n".join(map(str, content)) if isinstance(content, list) else str(content)
            rows.append({"from": files[-1].name, "reward": row.get("rewards"), "text": printable(text)})
        return rows

    def _logs(self) -> dict[str, str]:
        """The end of the log that was written last."""
        files = [path for path in (self.log_dir / "actors").glob("*") if path.is_file() and path.stat().st_size]
        newest = max(files, key=lambda path: path.stat().st_mtime, default=None)
        if newest is None:
            lines = self._progress.said if self._progress is not None else ()
            return {"the terminal": "\n".join(map(printable, lines))}
        with newest.open("rb") as file:
            file.seek(max(0, newest.stat().st_size - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).decode("utf-8", "replace").splitlines()
        return {f"actors/{newest.name}": "\n".join(map(printable, lines[-_TAIL_LINES:]))}


@contextmanager
def run_page(log_dir: Path, port: int) -> Generator[tuple[RunPage, str]]:
    """Serves the page for the length of the block; yields it with its address.

    Args:
        log_dir: `logger.log_dir`, which gets the address file.
        port: Where to listen on this machine; 0 takes a free port.

    Raises PageError: the port cannot be listened on.
    """
    page = RunPage(log_dir)
    token = secrets.token_urlsafe(16)
    app = _app(page, token)
    server, url = serve_page(app, token, host="127.0.0.1", port=port, name="run-page", option="--page-port")
    try:
        with private_file(log_dir / PAGE_ADDRESS, json.dumps({"url": url, "pid": os.getpid()})):
            yield page, url
    finally:
        server.close()


def _app(page: RunPage, token: str) -> Starlette:
    def root(request: Request) -> Response:
        # The script sets a model's output as text, never as markup.
        return HTMLResponse(filled_page(_TEMPLATE, str(page.data()["title"])))

    def data(request: Request) -> Response:
        return JSONResponse(page.data())

    def files(request: Request) -> Response:
        return file_of(page.log_dir, request.path_params["path"])

    routes = [Route("/", root), Route("/data.json", data), Route("/files/{path:path}", files)]
    return guarded_app(routes, partial(shows_token, token), token_to_read=True, cookie=_COOKIE)

"""Add, remove and list over HTTP, on this machine's loopback.

`GET /adapters`, `POST /adapters` with `{"file": PATH}` and `DELETE /adapters/NAME`, JSON both ways. A request needs the
token that the job writes, with its address, into a file of its log directory that its user alone can read.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from nemo_rl.config.errors import ConfigError, UserError
from nemo_rl.config.multi_lora import load_adapter

if TYPE_CHECKING:
    from nemo_rl.algorithms.multi_lora.job import MultiLoraJob

ADDRESS_FILE = "adapters.json"
_TIMEOUT_S = 60.0
_POLL_S = 0.05  # the end of a job waits so long for its server
_MOST_BYTES = 1 << 20


class JobUnreachable(UserError, RuntimeError):
    """A job does not answer, or refused a request."""


@contextmanager
def serve(job: MultiLoraJob, base: Mapping[str, object], log_dir: Path, port: int) -> Generator[str]:
    """Serves a job inside the block; its address. `base`: mapping that adapters' files are laid over. Raises OSError:
    the port is taken, or the directory cannot be written.
    """
    token = secrets.token_hex(16)
    server = ThreadingHTTPServer(("127.0.0.1", port), _handler(job, base, token))
    thread = threading.Thread(target=server.serve_forever, args=(_POLL_S,), name="adapters-http", daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    log_dir.mkdir(parents=True, exist_ok=True)
    file = log_dir / ADDRESS_FILE
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        json.dump({"address": address, "token": token}, opened)
    try:
        yield address
    finally:
        file.unlink(missing_ok=True)
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(job: MultiLoraJob, base: Mapping[str, object], token: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Silent."""

        def do_GET(self) -> None:
            self._answer(lambda: [state.plain() for state in job.states()], "/adapters")

        def do_POST(self) -> None:
            def add() -> object:
                size = int(self.headers.get("Content-Length", "0"))
                if not 0 <= size <= _MOST_BYTES:
                    raise ConfigError([f"Content-Length is {size}; 0 to {_MOST_BYTES} bytes are read"])
                asked: object = json.loads(self.rfile.read(size) or b"null")
                if not isinstance(asked, dict) or not isinstance(asked.get("file"), str):
                    raise ConfigError(['expected {"file": PATH}, the path of an adapter\'s YAML file'])
                return job.add(load_adapter(base, asked["file"])).plain()

            self._answer(add, "/adapters")

        def do_DELETE(self) -> None:
            name = self.path.removeprefix("/adapters/")
            self._answer(lambda: job.remove(name).plain(), f"/adapters/{name}")

        def _answer(self, work: Callable[[], object], path: str) -> None:
            if not secrets.compare_digest(self.headers.get("Authorization", "").encode(), f"Bearer {token}".encode()):
                self._send(401, {"error": f"the token in {ADDRESS_FILE} of the job's log directory is missing"})
            elif self.path != path:
                self._send(404, {"error": f"there is no {self.path}; see GET /adapters"})
            else:
                try:
                    self._send(200, work())
                except (UserError, ValueError, OSError) as error:
                    self._send(400, {"error": str(error)})

        def _send(self, status: int, content: object) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler


def call(log_dir: Path, method: str, path: str, content: object = None) -> object:
    """The answer of the job that logs to a directory. Raises JobUnreachable: none runs there, or it refused."""
    file = log_dir / ADDRESS_FILE
    if not file.is_file():
        raise JobUnreachable(f"{file}: no job of adapters runs with this log directory")
    there = json.loads(file.read_text(encoding="utf-8"))
    body = None if content is None else json.dumps(content).encode()
    request = Request(there["address"] + path, body, {"Authorization": f"Bearer {there['token']}"}, method=method)
    try:
        with urlopen(request, timeout=_TIMEOUT_S) as answer:
            return json.loads(answer.read())
    except HTTPError as error:
        raise JobUnreachable(str(json.loads(error.read())["error"])) from error
    except (URLError, TimeoutError) as error:
        raise JobUnreachable(f"{there['address']}: the job does not answer ({error})") from error

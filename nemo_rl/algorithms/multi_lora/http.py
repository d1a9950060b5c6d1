"""Add, remove and list over HTTP, on this machine's loopback.

`GET /adapters`, `POST /adapters` with `{"file": PATH}` and `DELETE /adapters/NAME`, JSON both ways. A request needs the
token that the job writes, with its address, into a file of its log directory that its user alone can read.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from nemo_rl.config.errors import ConfigError, UserError
from nemo_rl.config.multi_lora import load_adapter
from nemo_rl.utils.files import ADAPTERS_ADDRESS, private_file

if TYPE_CHECKING:
    from starlette import requests
    from starlette.responses import Response
    from starlette.types import ASGIApp

    from nemo_rl.algorithms.multi_lora.job import MultiLoraJob

_TIMEOUT_S = 60.0
_MOST_BYTES = 1 << 20


class JobUnreachable(UserError, RuntimeError):
    """A job does not answer, or refused a request."""


@contextmanager
def serve(job: MultiLoraJob, base: Mapping[str, object], log_dir: Path, port: int) -> Generator[str]:
    """Serves a job inside the block; its address. `base`: mapping that adapters' files are laid over. Raises OSError:
    the port is taken, or the directory cannot be written.
    """
    from nemo_rl.utils.http_server import BackgroundServer

    token = secrets.token_hex(16)
    server = BackgroundServer(_app(job, base, token), host="127.0.0.1", port=port, name="adapters-http")
    address = f"http://127.0.0.1:{server.port}"
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        with private_file(log_dir / ADAPTERS_ADDRESS, json.dumps({"address": address, "token": token})):
            yield address
    finally:
        server.close()


def _app(job: MultiLoraJob, base: Mapping[str, object], token: str) -> ASGIApp:
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    from nemo_rl.utils.http_server import bearer_only

    def listed(request: requests.Request, body: bytes) -> object:
        return [state.plain() for state in job.states()]

    def add(request: requests.Request, body: bytes) -> object:
        asked: object = json.loads(body or b"null")
        if not isinstance(asked, dict) or not isinstance(asked.get("file"), str):
            raise ConfigError(['expected {"file": PATH}, the path of an adapter\'s YAML file'])
        return job.add(load_adapter(base, asked["file"])).plain()

    def remove(request: requests.Request, body: bytes) -> object:
        return job.remove(request.path_params["name"]).plain()

    def elsewhere(request: requests.Request, body: bytes) -> object:
        raise ValueError(f"there is no {request.url.path}; see GET /adapters")

    def answered(work: Callable[[requests.Request, bytes], object]) -> Callable[..., Awaitable[Response]]:
        async def answer(request: requests.Request) -> Response:
            body = bytearray()
            async for part in request.stream():
                body += part
                if len(body) > _MOST_BYTES:
                    return JSONResponse({"error": f"the body is too long; at most {_MOST_BYTES} bytes are read"}, 400)
            try:
                return JSONResponse(await run_in_threadpool(work, request, bytes(body)))
            except (UserError, ValueError, OSError) as error:
                return JSONResponse({"error": str(error)}, 404 if work is elsewhere else 400)

        return answer

    app = Starlette(
        routes=[
            Route("/adapters", answered(listed), methods=["GET"]),
            Route("/adapters", answered(add), methods=["POST"]),
            Route("/adapters/{name}", answered(remove), methods=["DELETE"]),
            Route("/{path:path}", answered(elsewhere), methods=["GET", "POST", "DELETE"]),
        ]
    )
    said = f"the token in {ADAPTERS_ADDRESS} of the job's log directory is missing"
    return bearer_only(app, token, JSONResponse({"error": said}, 401))


def call(log_dir: Path, method: str, path: str, content: object = None) -> object:
    """The answer of the job that logs to a directory. Raises JobUnreachable: none runs there, or it refused."""
    file = log_dir / ADAPTERS_ADDRESS
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

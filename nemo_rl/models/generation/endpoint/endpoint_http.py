"""HTTP of the endpoint: its socket, the checks before a request, and the forms of responses.

Knows no vLLM and no sessions.
"""

from __future__ import annotations

import asyncio
import base64
import io
import resource
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from nemo_rl.config.errors import UserError
from nemo_rl.models.generation.decisions import Array, SamplingMasks, TokenRoutes
from nemo_rl.utils.http_server import bearer_only

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_RETRY_AFTER_S = 5
_MOST_DESCRIPTORS = 65_536


class EndpointError(UserError, RuntimeError):
    """The endpoint cannot start."""


class TooLarge(UserError, ValueError):
    """A body above the limit."""


class Slots:
    """Limits the responses that are generated at once; first come, first served.

    Args:
        count: Places.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._value = count  # places that are free
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, responses: int) -> Callable[[], None]:
        """Waits for the places of a request and returns the function that gives them back. A request of more responses
        than there are places takes all.
        """
        places = min(responses, self._count)
        granted = asyncio.get_running_loop().create_future()
        self._waiting.append((places, granted))
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self._give_back(places)
            else:
                self._waiting = deque(entry for entry in self._waiting if entry[1] is not granted)
                self._grant()
            raise
        return lambda: self._give_back(places)

    def _give_back(self, places: int) -> None:
        self._value += places
        self._grant()

    def _grant(self) -> None:
        while self._waiting and (self._waiting[0][1].done() or self._waiting[0][0] <= self._value):
            places, granted = self._waiting.popleft()
            if not granted.done():
                self._value -= places
                granted.set_result(None)


def connections() -> int:
    """Number of connections that the endpoint may keep: half of this process's file descriptors, so that the rest of
    the run goes on. Raises the limit as far as the system allows.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return (_MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft) // 2


def bound_socket(host: str, ports: tuple[int, int]) -> socket.socket:
    """A socket on the first free port of a range."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    error: OSError | None = None
    for port in range(ports[0], ports[1] + 1):
        bound = socket.socket(family, socket.SOCK_STREAM)
        # Connections that a run has just closed hold no port for the next one. One that listens does.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((host, port))
            bound.listen(2048)
            return bound
        except OSError as refused:
            bound.close()
            error = refused
    raise EndpointError(
        f"policy.generation.port_range_low={ports[0]}, port_range_high={ports[1]}: no port of {host} is free for the "
        f"endpoint (the last said: {error}); another run may hold them: widen the range"
    )


def root_url(bound: socket.socket) -> str:
    """The address for clients of a socket: this machine's where it listens on all of them."""
    import ray

    host, port = bound.getsockname()[:2]
    host = ray.util.get_node_ip_address() if host in ("0.0.0.0", "::") else host
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def guarded(app: ASGIApp, token: str | None, max_body_bytes: int) -> ASGIApp:
    """The app behind the checks of token and body size."""

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > max_body_bytes:
                raise TooLarge
            return message

        await app(scope, counted, send)

    said = "wrong or missing token; send Authorization: Bearer TOKEN"
    # Connections without the token are closed.
    return bearer_only(checked, token, error_response(401, said, "AuthenticationError", {"Connection": "close"}))


async def unless_gone(work: Coroutine[object, object, Response], request: Request) -> Response:
    """The response of `work`, which is cancelled when the client closes the connection."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_closed(request))
    try:
        await asyncio.wait([working, gone], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else error_response(499, "the client is gone")
    finally:
        gone.cancel()
        working.cancel()


async def _closed(request: Request) -> None:
    """Returns when the client has closed the connection. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def json_response(content: Mapping[str, object], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    from starlette.responses import Response

    return Response(orjson.dumps(content), status, headers, media_type="application/json")


def error_response(
    status: int, message: str, kind: str = "BadRequestError", headers: dict[str, str] | None = None
) -> Response:
    content = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return json_response(content, status, headers)


async def no_such_path(request: Request, error: Any) -> Response:
    """Response to a path that is not served."""
    return error_response(
        error.status_code,
        f"{request.method} {request.url.path} is not served; POST /v1/chat/completions, /v1/completions, /tokenize and "
        "/detokenize are, and GET /v1/models. The OpenAI Agents SDK asks for /v1/responses unless its model is an "
        "OpenAIChatCompletionsModel",
        "NotFoundError",
    )


def unavailable(message: str) -> Response:
    return error_response(503, message, "ServiceUnavailableError", {"Retry-After": str(_RETRY_AFTER_S)})


def event_stream(events: AsyncIterator[str], on_end: Callable[[], None]) -> Response:
    """A response that is sent event by event. `on_end`: called once, when it is sent or its client is gone."""
    from starlette.responses import StreamingResponse

    class Events(StreamingResponse):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await super().__call__(scope, receive, send)
            finally:
                on_end()

    return Events(events, media_type="text/event-stream")


def answer_of(choice: Mapping[str, Any]) -> dict[str, object]:
    """The message of a choice as a client sends it back; empty for one of plain text."""
    return {name: value for name, value in (choice.get("message") or {}).items() if value is not None}


def decisions_of(routes: TokenRoutes | None, masks: SamplingMasks | None, start: int = 0) -> dict[str, str]:
    """Fields of a choice that hold its routes from position `start` on and its sampling masks, by the names and in the
    types of the training columns; None gives no field.
    """
    arrays: dict[str, Array] = {}
    if routes is not None:
        arrays |= {"routed_experts": routes.experts[start:], "routed_experts_valid": routes.valid[start:]}
    if masks is not None:
        arrays |= {"sampling_mask_counts": masks.counts, "sampling_mask_ids": masks.ids}
    return {name: _encoded(array) for name, array in arrays.items()}


def _encoded(array: Array) -> str:
    """Base64 of an array's .npy form, as vLLM's own server sends routes."""
    with io.BytesIO() as file:
        np.save(file, array, allow_pickle=False)
        return base64.b64encode(file.getbuffer()).decode()

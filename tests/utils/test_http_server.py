"""What visitors of a server of this package cannot do to it."""

from __future__ import annotations

import os
import socket
import stat
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from nemo_rl.utils.files import ADDRESS_FILES, private_file
from nemo_rl.utils.http_server import BackgroundServer, Bounds, file_of, guarded_app, shows_token

TOKEN = "the token of the test"
Serve = Callable[..., BackgroundServer]
HALF_A_BODY = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\nhalf"
NAMES = ["%00", "a%00b", "%ff%fe", "..%00/..", "loop", "loop/a", "closed", "~", "%2e%2e/outside"]


@pytest.fixture
def serve() -> Iterator[Serve]:
    with ExitStack() as servers:

        def started(app: Starlette, **bounds: float) -> BackgroundServer:
            given: dict[str, Any] = {"request_s": 2, "body_s": 2, "answer_s": 5, "idle_s": 5, "visitors": 20, **bounds}
            server = BackgroundServer(app, host="127.0.0.1", name="test", bounds=Bounds(**given))
            servers.callback(server.close)
            return server

        yield started


def app(folder: Path | None = None) -> Starlette:
    async def hello(request: Request) -> Response:
        return PlainTextResponse(str(len(await request.body())))

    def files(request: Request) -> Response:
        return file_of(folder or Path("/nowhere"), request.path_params["path"])

    def slow(request: Request) -> Response:
        time.sleep(1.5)
        return PlainTextResponse("slow")

    routes = [Route("/", hello, methods=["GET", "POST"]), Route("/slow", slow), Route("/files/{path:path}", files)]
    return guarded_app(routes, partial(shows_token, TOKEN), token_to_read=True, cookie="cookie")


def connected(server: BackgroundServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def head(path: str = "/", *more: str) -> bytes:
    return "\r\n".join(
        [f"GET {path} HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {TOKEN}", *more, "", ""]
    ).encode()


def answer(visitor: socket.socket) -> bytes:
    got = b""
    while b"\r\n\r\n" not in got and (part := visitor.recv(4096)):
        got += part
    return got


def status(server: BackgroundServer, path: str) -> int:
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}{path}", headers={"Authorization": f"Bearer {TOKEN}"}
    )
    try:
        return int(urllib.request.urlopen(request, timeout=20).status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HT", b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\nhalf"]
)
def test_many_half_sent_requests_keep_no_honest_visitor_out(serve: Serve, sent: bytes) -> None:
    server = serve(app(), request_s=60, body_s=60)
    before = len(os.listdir("/proc/self/fd"))
    with ExitStack() as attack:
        for _ in range(300):
            visitor = attack.enter_context(connected(server))
            with suppress(OSError):
                visitor.sendall(sent.replace(b"Host", f"Authorization: Bearer {TOKEN}\r\nHost".encode()))
        assert status(server, "/") == 200
        # Both ends are in this process: 300 of the attack, and the server's few.
        assert len(os.listdir("/proc/self/fd")) - before < 300 + 2 * 20


def test_half_a_request_is_cut_off_also_after_a_whole_one(serve: Serve) -> None:
    server = serve(app(), request_s=0.5, body_s=0.5, idle_s=30)
    for begun in (head()[:20], head("/", "Content-Length: 9") + b"half"):
        with connected(server) as visitor:
            visitor.sendall(head())
            assert answer(visitor).startswith(b"HTTP/1.1 200")
            visitor.sendall(begun)
            began = time.monotonic()
            visitor.settimeout(10)
            with suppress(ConnectionResetError):
                while visitor.recv(4096):
                    pass
            assert time.monotonic() - began < 5


def test_an_idle_visitor_is_kept_and_a_pipelined_request_gets_its_own_time(
    serve: Serve,
) -> None:
    server = serve(app(), request_s=0.5, body_s=0.5, idle_s=30, answer_s=10)
    with connected(server) as visitor:
        visitor.sendall(head())
        assert answer(visitor).startswith(b"HTTP/1.1 200")
        time.sleep(1.2)
        visitor.sendall(head() + head("/slow"))
        got = b""
        while got.count(b"HTTP/1.1 200") < 2:
            part = visitor.recv(4096)
            assert part, got
            got += part
        while b"slow" not in got:
            got += visitor.recv(4096)


def test_an_answer_that_nobody_reads_ends(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(os.urandom(32 << 20))
    server = serve(app(tmp_path), answer_s=1)
    with connected(server) as visitor:
        visitor.sendall(head("/files/large"))
        time.sleep(3)
        got = 0
        with suppress(ConnectionResetError):
            while part := visitor.recv(1 << 20):
                got += len(part)
        assert got < 32 << 20


@pytest.mark.parametrize(
    "name",
    ["%00", "a%00b", "x" * 5000, "%ff%fe", "..%00/..", "loop", "loop/a", "closed", "~", "a/" * 2000, "%2e%2e/outside"],
)
def test_a_name_that_no_file_has_is_not_found(serve: Serve, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "outside").write_text("x")
    (folder / "loop").symlink_to("loop")
    assert status(serve(app(folder)), f"/files/{name}") == 404


def test_addresses_with_tokens_are_neither_listed_nor_served(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}")
    with ExitStack() as files:
        for name in ADDRESS_FILES:
            files.enter_context(private_file(tmp_path / name, "token"))
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
        server = serve(app(tmp_path))
        assert [status(server, f"/files/{name}") for name in ADDRESS_FILES] == [404, 404]
        with connected(server) as visitor:
            visitor.sendall(head("/files/", "Connection: close"))
            listed = b""
            while part := visitor.recv(4096):
                listed += part
        assert b"metrics.jsonl" in listed and not any(name.encode() in listed for name in ADDRESS_FILES)


@pytest.mark.parametrize("more", [(), (f"Authorization: Bearer {TOKEN}",)])
def test_a_websocket_is_answered_as_any_other_request(serve: Serve, more: tuple[str, ...]) -> None:
    key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
    upgrade = ["Upgrade: websocket", "Connection: Upgrade", key, "Sec-WebSocket-Version: 13"]
    with connected(serve(app())) as visitor:
        visitor.sendall("\r\n".join(["GET / HTTP/1.1", "Host: 127.0.0.1", *upgrade, *more, "", ""]).encode())
        assert answer(visitor).split()[1] == (b"200" if more else b"403")


def test_who_was_answered_before_keeps_the_connection_while_strangers_come(
    serve: Serve,
) -> None:
    server = serve(app(), request_s=60, idle_s=60)
    with ExitStack() as attack, connected(server) as known:
        known.sendall(head())
        assert answer(known).startswith(b"HTTP/1.1 200")
        for _ in range(100):
            attack.enter_context(connected(server))
        known.sendall(head())
        assert b"HTTP/1.1 200" in answer(known)

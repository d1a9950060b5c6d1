"""Web pages: access by token, response headers, and files of a folder.

Invariants: a token-protected page shows nothing without the token; links never leave the page's folder; a report, which
contains model output, is sandboxed into an origin of its own.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote, urlsplit

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route

from nemo_rl.config.errors import UserError
from nemo_rl.utils.http_server import BackgroundServer, bearer, shows_token

NEEDS_TOKEN = "this needs the page's token: open the address that was printed\n"
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_REPORT_POLICY = "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; \
img-src data:; font-src data:"
_MOST_FILES = 1000


class PageError(UserError, RuntimeError):
    """The page cannot be served as asked."""


def guarded_app(routes: Sequence[Route], token: str, *, token_to_read: bool, cookie: str) -> Starlette:
    """An ASGI application that asks for a token.

    Args:
        routes: Its routes; a 404 names them.
        token: As `?token=`, bearer token or cookie; `/?token=` sets the cookie.
        token_to_read: Whether reading needs a token; without, any client that addresses this machine by its own name
            may read.
    """

    def elsewhere(request: Request) -> Response:
        known = [route.path for route in routes if "{" not in route.path]
        return PlainTextResponse(f"see {', '.join(known)}\n", 404)

    async def guarded(request: Request, answer: RequestResponseEndpoint) -> Response:
        try:
            host = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
        except ValueError:
            return PlainTextResponse("the Host header is not an address\n", 400)
        asked = request.query_params.get("token", "")
        # A foreign page that has its name resolved to this machine is not this machine's user.
        shown = shows_token(token, [asked, bearer(request), request.cookies.get(cookie, "")])
        if not (shown if token_to_read else of_this_machine(host)):
            return PlainTextResponse(NEEDS_TOKEN, 403, _HEADERS)
        try:
            answered = await answer(request)
        except RuntimeError:
            # Starlette raises this when the visitor has disconnected; there is no one to answer.
            if not await request.is_disconnected():
                raise
            return Response(status_code=499)
        for name, value in _HEADERS.items():
            answered.headers.setdefault(name, value)
        if token_to_read and request.url.path == "/" and shows_token(token, [asked]):
            answered.set_cookie(cookie, token, httponly=True, samesite="strict")
        return answered

    return Starlette(
        routes=[*routes, Route("/{path:path}", elsewhere)],
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=guarded), Middleware(GZipMiddleware, compresslevel=1)],
    )


def serve_page(app: Starlette, token: str | None, *, host: str, port: int, name: str) -> tuple[BackgroundServer, str]:
    """Starts serving; the server, and the page's address with the token, where there is one. Raises PageError: the
    address cannot be listened on.
    """
    try:
        server = BackgroundServer(app, host=host, port=port, name=name)
    except OSError as error:
        raise PageError(f"--port {port}: {host} cannot be listened on ({error.strerror or error})") from error
    shown = f"[{host}]" if ":" in host else host
    return server, f"http://{shown}:{server.port}/" + (f"?token={quote(token)}" if token else "")


def of_this_machine(host: str) -> bool:
    """Whether a host is this machine by a name that no other one has."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def file_of(folder: Path, path: str) -> Response:
    """A file of a folder or below it."""
    # Links lead out of the folder only by a name that a visitor must not choose.
    wanted = (folder / path).resolve()
    if not wanted.is_relative_to(folder.resolve()):
        return PlainTextResponse("outside the folder\n", 404)
    if wanted.is_dir():
        return PlainTextResponse("".join(f"{line}\n" for line in _listed(wanted)))
    if not wanted.is_file():
        return PlainTextResponse(f"{path}: there is no such file\n", 404)
    is_report = wanted.name == "report.html"
    return FileResponse(
        wanted,
        media_type="text/html" if is_report else "text/plain; charset=utf-8",
        headers={"Content-Security-Policy": _REPORT_POLICY} if is_report else None,
    )


def _listed(folder: Path) -> list[str]:
    """Files below a folder, without what links lead to."""
    found = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sorted(str(path.relative_to(folder)) for path in found)[:_MOST_FILES]

"""Finds a running Ray cluster, makes sure that it takes this process's token, and joins it.

Ray itself asks a cluster that does not answer, or does not take its token, for minutes and fills the terminal. Here
both are one error within seconds.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
import tempfile
import threading
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import contextmanager
from unittest.mock import patch

import ray
from ray._private import worker
from ray._private.utils import read_ray_address
from ray._raylet import (  # it is compiled
    AuthenticationTokenLoader,  # pyrefly: ignore[missing-module-attribute]
    Config,  # pyrefly: ignore[missing-module-attribute]
    GcsClient,  # pyrefly: ignore[missing-module-attribute]
)
from ray.exceptions import AuthenticationError, RayError

from nemo_rl.config.errors import UserError, first_line

logger = logging.getLogger(__name__)

LOCAL = "local"
_ANSWER_S, _JOIN_S = 5.0, 120.0
_LINE_OF_RAY = re.compile(rb"\[\d{4}-\d\d-\d\d |[IWEF]\d{4} \d\d:|WARNING: All log messages before absl")
"""How a line begins that Ray's compiled code, or gRPC below it, writes."""


class RayStartError(UserError, RuntimeError):
    """Ray could not be started or joined."""


def credentials() -> tuple[str, str]:
    """`RAY_AUTH_MODE` and the token by which others join the cluster that this process is connected to."""
    mode = os.environ.get("RAY_AUTH_MODE", "disabled").lower()
    return mode, AuthenticationTokenLoader.instance().get_raw_token() if mode == "token" else ""


def join_cluster(address: str, credentials: tuple[str, str] | None = None) -> None:
    """Joins a running cluster without showing its workers' output. Raises RayStartError: it does not answer, has
    another token, or does not let this process in. `credentials`: see `credentials`; by default from the environment.
    """
    if credentials is not None:
        os.environ["RAY_AUTH_MODE"], token = credentials
        if token:
            os.environ["RAY_AUTH_TOKEN"] = token
        _read_credentials_again()
    probe(address)
    joined: Future[object] = Future()

    def join() -> None:
        # Ray tells every thread but the main one that it leaves signals alone.
        logging.getLogger("ray._private.worker").setLevel(logging.ERROR)
        try:
            joined.set_result(ray.init(address=address, log_to_driver=False, configure_logging=False))
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            joined.set_exception(error)

    try:
        with without_errors_of_others():
            threading.Thread(target=join, name="join_cluster", daemon=True).start()
            joined.result(_JOIN_S)
    except TimeoutError as error:
        raise RayStartError(
            f"the Ray cluster {address} answers, but has not let this process in within {_JOIN_S:g} s; the load "
            f"average here is {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores: try again when it is less"
        ) from error
    except (ConnectionError, RuntimeError, RayError) as error:
        raise RayStartError(f"{address} cannot be joined: {first_line(error)}") from error


def running_cluster() -> str | None:
    """Address of a cluster that can be joined: the one that RAY_ADDRESS names, or one that runs on this machine."""
    named = os.environ.get("RAY_ADDRESS")
    return running_here() if not named else None if named == LOCAL else named


def running_here() -> str | None:
    """Address of the cluster that `ray start` left on this machine, if it still listens."""
    address = read_ray_address()
    if not address:
        return None
    try:
        _connect(address)
    except (OSError, ValueError):
        logger.info("ray=stale_address address=%s", address)
        return None
    return address


def probe(address: str) -> None:
    """Checks within seconds that RAY_ADDRESS answers; Ray would try for minutes. Raises RayStartError: it does not."""
    if ":" not in address:
        # `auto`, or a name that Ray resolves.
        return
    try:
        _connect(address.rpartition("://")[2])
    except ValueError as error:
        raise RayStartError(f"RAY_ADDRESS={address} is no address; expected host:port, auto or local") from error
    except OSError as error:
        raise RayStartError(
            f"RAY_ADDRESS={address} does not answer ({error.strerror or error}); start the cluster, unset RAY_ADDRESS, "
            "or set it to local"
        ) from error
    _authenticate(address.rpartition("://")[2])


def _authenticate(address: str) -> None:
    """Makes sure that the cluster takes this process's token; uses the user's own token where one is asked for."""
    if _is_let_in(address):
        return
    if not os.environ.get("RAY_AUTH_MODE") and AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True):
        os.environ["RAY_AUTH_MODE"] = "token"
        _read_credentials_again()
        if _is_let_in(address):
            return
    raise RayStartError(
        f"the Ray cluster {address} asks for its token: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN to it (or "
        "RAY_AUTH_TOKEN_PATH to a file with it; `ray get-auth-token` shows that of a user)"
    )


def _is_let_in(address: str) -> bool:
    try:
        with _no_lines_of_ray():
            GcsClient(address=address).get_all_node_info()
    except AuthenticationError:
        return False
    except RayError as error:
        raise RayStartError(f"RAY_ADDRESS={address} does not answer as a Ray cluster: {first_line(error)}") from error
    return True


def _read_credentials_again() -> None:
    """Ray has read the environment when it was imported."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def _no_lines_of_ray() -> Generator[None]:
    """Suppresses the lines of Ray's compiled code on standard error in the block: the error itself is raised. Lines of
    other threads are shown at the end of the block.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            held.seek(0)
            for line in held:
                if not _LINE_OF_RAY.match(line):
                    os.write(2, line)


def do_nothing(*arguments: object, **options: object) -> None:
    """Replaces a function of Ray that is switched off."""


@contextmanager
def without_errors_of_others() -> Generator[None]:
    """Keeps Ray from printing errors of ended workers; callers get exceptions."""
    with patch.object(worker, "listen_error_messages", do_nothing):
        yield


def _connect(address: str) -> None:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S):
        pass

"""What Ray calls to start a worker: has `tests.fork_server` fork it. Imports little, as it runs for each worker."""

import json
import os
import socket
import sys

_CONTEXT = "--serialized-runtime-env-context="


def _main(arguments: list[str]) -> None:
    context = next((json.loads(each[len(_CONTEXT) :]) for each in arguments if each.startswith(_CONTEXT)), {})
    if context.get("command_prefix") or context.get("py_executable", sys.executable) != sys.executable:
        from ray._private.workers import setup_worker

        os.execv(sys.executable, [sys.executable, setup_worker.__file__, *arguments])
    environment = dict(os.environ)
    for name, value in context.get("env_vars", {}).items():
        environment[name] = value
    command = [each for each in arguments if not each.startswith((_CONTEXT, "--language="))]
    body = json.dumps(
        {"command": command, "environment": environment, "folder": os.getcwd(), "new_session": False}
    ).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ["NRL_TEST_FORKS"])
        socket.send_fds(connection, [len(body).to_bytes(4, "big")], [0, 1, 2])
        connection.sendall(body)
        connection.recv(4)


_main(sys.argv[1:])

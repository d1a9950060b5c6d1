"""What a raylet calls to start its agent of runtime environments: has `tests.fork_server` fork it; ends with that or
with the raylet.
"""

import json
import os
import select
import socket
import sys

_POLL_S = 0.25


def _main(command: list[str]) -> int:
    raylet = os.getppid()
    order = {"command": command, "environment": dict(os.environ), "folder": os.getcwd(), "new_session": False}
    body = json.dumps(order | {"ends_with_caller": True}).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ["NRL_TEST_FORKS"])
        socket.send_fds(connection, [len(body).to_bytes(4, "big")], [0, 1, 2])
        connection.sendall(body)
        connection.recv(4)
        while not select.select([connection], [], [], _POLL_S)[0]:
            if os.getppid() != raylet:
                return 0
        return int.from_bytes(connection.recv(4), "big", signed=True)


sys.exit(_main(sys.argv[1:]))

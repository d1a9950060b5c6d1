"""Runs beside Ray's raylet in place of its dashboard agent, which costs two seconds of processor time.

The raylet requires a running agent that has written its ports. -1 is what Ray's own agent writes for a service that it
does not offer. Started by path, without the package: it imports nothing but the standard library.
"""

import os
import sys
import time

_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
_POLL_S = 1.0


def run(session_dir: str, node_id: str) -> None:
    """Writes the ports, then waits until the raylet has ended; Ray ends it earlier."""
    raylet = os.getppid()
    for name in _PORTS:
        path = os.path.join(session_dir, f"{name}_{node_id}")
        # The raylet reads a file as soon as it is there.
        with open(f"{path}.new", "w") as file:
            file.write("-1")
        os.rename(f"{path}.new", path)
    while os.getppid() == raylet:
        time.sleep(_POLL_S)


if __name__ == "__main__":
    run(*sys.argv[1:])

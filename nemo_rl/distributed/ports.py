"""Free ports of this machine, each reserved for one process at a time.

A reservation is an abstract Unix socket that the process holds until it ends, or for the time that was asked for, so
two runs that choose before either listens get different ports. Invariant: a process that asks again and again, for
ports that are used a short time, neither runs out of ports nor collects sockets. Ranges must be below the ephemeral
ports (32768 and up on Linux), which the kernel may give to outgoing connections.
"""

from __future__ import annotations

import math
import random
import socket
import time
from collections.abc import Collection

LOWEST, HIGHEST = 20000, 31999
"""Where ports are looked for unless a range is named."""

_promises: dict[int, tuple[socket.socket, float]] = {}
"""What this process holds, by port, and until when by the monotonic clock, in seconds."""


def free_ports(
    count: int,
    low: int = LOWEST,
    high: int = HIGHEST,
    taken: Collection[int] = (),
    hold_s: float = math.inf,
) -> list[int]:
    """Up to `count` free ports between `low` and `high` (both included) that are not in `taken`, reserved for `hold_s`
    seconds.

    A port that another run is about to use is given only where no others are free.
    """
    now = time.monotonic()
    for port in [port for port, (_, until) in _promises.items() if until < now]:
        _promises.pop(port)[0].close()
    excluded = set(taken)
    candidates = [port for port in range(low, high + 1) if port not in excluded]
    # Not the global generator: it would be the same order in every run of a seed.
    random.SystemRandom().shuffle(candidates)
    found: list[int] = []
    promised: list[int] = []
    for port in candidates:
        if len(found) == count:
            break
        if _is_free(port):
            (found if _promise(port, now + hold_s) else promised).append(port)
    return found + promised[: count - len(found)]


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            return False
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _promise(port: int, until: float) -> bool:
    """Holds the promise of a port; False if this or another process holds it already."""
    promise = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        promise.bind(f"\0nemo_rl_port_{port}")
    except OSError:
        promise.close()
        return False
    _promises[port] = promise, until
    return True

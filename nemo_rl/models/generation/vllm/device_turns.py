"""Engines of one device take turns where one reads how much memory is free or in use, and another would change it.

A turn is an abstract Unix socket, which one process of a machine holds at a time and which the system takes back when
that process ends, however it ends. Invariant: of the engines of one device at most one starts, sleeps or wakes.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from nemo_rl.models.generation.interfaces import GenerationError

# Several engines that compile for the first time are minutes apart.
_WAIT_S = 1800.0
_POLL_S = 0.01


@asynccontextmanager
async def device_turn(device: str | None, *, timeout_s: float = _WAIT_S) -> AsyncGenerator[None]:
    """Waits for the others of a device, and has them wait until the block ends.

    Args:
        device: Its name, which no other device of the machine has; None where there are no others.
        timeout_s: How long to wait, in seconds.

    Raises GenerationError: the others did not end in time.
    """
    if device is None:
        yield
        return
    deadline = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as turn:
        while not _taken(turn, device):
            if time.monotonic() > deadline:
                raise GenerationError(
                    f"the other engines of this device (policy.generation.vllm_cfg.engines_per_gpu) did not end to "
                    f"start, sleep or wake within {timeout_s:.0f} s"
                )
            await asyncio.sleep(_POLL_S)
        yield


def _taken(turn: socket.socket, device: str) -> bool:
    try:
        turn.bind(f"\0nemo_rl_device_{device}")
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True

"""Ending processes of this node for good. Knows neither Ray nor torch. Invariant: whoever is told that all are gone may
give on what they held.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import psutil


def kill_and_wait(processes: Sequence[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Kills processes and waits; those that are not gone within `timeout_s`."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return list(alive)

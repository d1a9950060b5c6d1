"""Memory of one process: what its tensors take on its GPU, and what it takes of the host.

Readings are exact where growth matters: bytes that PyTorch has handed out, not what it keeps for later, and host memory
that no file backs.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of one process. `device`: of tensors on its GPU; `peak`: most of them since the last reading; `total`: of
    the whole GPU. All three are None without a GPU.
    """

    host: int
    device: int | None = None
    peak: int | None = None
    total: int | None = None


def process_memory(_actor: object = None) -> MemoryUse:
    """Memory of this process and the processes below it. Takes an actor, so that Ray can call it on any
    (`actor.__ray_call__`).
    """
    host = host_bytes()
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return MemoryUse(host)
    used, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return MemoryUse(host, used, peak, torch.cuda.mem_get_info()[1])


def own_host_bytes() -> int:
    """Host memory of this process that no file and no shared segment backs, in bytes."""
    return _anonymous_bytes(os.getpid())


def host_bytes() -> int:
    """The same of this process and those below it."""
    children = psutil.Process().children(recursive=True)
    return sum(_anonymous_bytes(pid) for pid in (os.getpid(), *(child.pid for child in children)))


def _anonymous_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as statm:
            fields = statm.read().split()
    except (FileNotFoundError, ProcessLookupError):
        # It ended between the listing and the reading.
        return 0
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 2 else 0

"""Memory of one process: its tensors on the GPU, and its host memory.

Readings are exact where growth matters: bytes that PyTorch has handed out, not what it keeps for later, and host memory
that no file backs.
"""

from __future__ import annotations

import ctypes
import gc
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


def tidy() -> None:
    """Frees cycles of objects and gives freed heap back to the system: a tenth of a second, in which nothing else runs
    here. Processes of a run search for cycles rarely, and the C library keeps what tensors of other sizes leave behind;
    both look like a leak for hundreds of steps.
    """
    gc.collect()
    if sys.platform.startswith("linux"):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def tidy_process_memory(_actor: object = None) -> MemoryUse:
    """`process_memory` after `tidy`."""
    tidy()
    return process_memory()


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


def resident_bytes(pid: int | None = None, *, shared: bool = True) -> int:
    """Resident memory of a process, of this one by default, in bytes; 0 if it has ended. Without `shared`, pages backed
    by a file or a shared segment do not count.
    """
    try:
        with open(f"/proc/{pid or 'self'}/statm") as statm:
            fields = statm.read().split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    pages = int(fields[1]) - (0 if shared else int(fields[2])) if len(fields) > 2 else 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def own_host_bytes() -> int:
    """Host memory of this process that no file and no shared segment backs, in bytes."""
    return resident_bytes(shared=False)


def host_bytes() -> int:
    """The same of this process and those below it."""
    children = psutil.Process().children(recursive=True)
    return own_host_bytes() + sum(resident_bytes(child.pid, shared=False) for child in children)

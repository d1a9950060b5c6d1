"""The device of this process: what differs between a GPU and a CPU slot.

Memory readings, pinned staging memory, names and freeing of cached memory. Invariant: code outside this package, the
transports and the backends never names `torch.cuda`.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from dataclasses import dataclass

import psutil
import torch

from nemo_rl.distributed.accelerator_slots import CPU, CUDA, SLOT_BYTES_VARIABLE


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


SHARED_MEMORY_DIR = "/dev/shm"


def device_of_process() -> torch.device:
    """The accelerator device that this process may use: `cuda:0` when a GPU is visible, else the CPU."""
    return CUDA.torch_device() if torch.cuda.is_available() else CPU.torch_device()


def memory_in_use(device: torch.device) -> int:
    """Bytes in use on the device: of the whole GPU, or resident memory of this process on a CPU slot."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return resident_bytes()


class _MallocCounts(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def allocated_bytes(device: torch.device) -> int:
    """Bytes in use on the whole GPU; on a CPU slot the bytes that the C library has allocated for this process, which
    are exact, while resident memory moves by megabytes on its own (resident memory if the library does not count).
    """
    library = ctypes.CDLL(None)
    if device.type == "cuda" or not hasattr(library, "mallinfo2"):
        return memory_in_use(device)
    library.mallinfo2.restype = _MallocCounts
    counts = library.mallinfo2()
    return int(counts.uordblks) + int(counts.hblkhd)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated: free on the GPU, or available on the host."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo") as meminfo:
        for line in meminfo:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable line; host memory cannot be read")


def keep_to_slot(device: torch.device) -> None:
    """Limits PyTorch's allocations in this process to its slot's memory, where other jobs use the device: a larger
    tensor raises `torch.OutOfMemoryError`.
    """
    given = os.environ.get(SLOT_BYTES_VARIABLE)
    if given is not None and device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(min(int(given) / total_memory(device), 1.0), device)


def allowed_memory(device: torch.device) -> int:
    """Bytes that this process may still allocate: free memory, or less in a slot."""
    free, given = free_memory(device), os.environ.get(SLOT_BYTES_VARIABLE)
    if given is None or device.type != "cuda":
        return free
    return min(free, int(given) - torch.cuda.memory_reserved(device))


def total_memory(device: torch.device) -> int:
    """Bytes of the whole GPU, or of the host."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a host tensor to the device, from pinned memory: another copy would wait for all queued work."""
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def release_cached_memory(device: torch.device) -> None:
    """Gives memory that nothing uses any more back to the device or, on a CPU slot, to the operating system."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    else:
        tidy()


def synchronize(device: torch.device) -> None:
    """Waits until work queued on the device is done; a CPU slot has nothing queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_uuid(device: torch.device) -> str:
    """An identity `device@host` of the physical device, equal in every process; CPU slots of a host share one. A host
    is what shares memory: containers of one machine, each with shared memory of its own, are several.
    """
    with open("/proc/sys/kernel/random/boot_id") as boot_id:
        host = f"{boot_id.read().strip()}.{os.stat(SHARED_MEMORY_DIR).st_dev}"
    name = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"
    return f"{name}@{host}"


def host_of(identity: str) -> str:
    """The host part of a device identity."""
    return identity.rpartition("@")[2]


def host_memory_of(identity: str) -> str:
    """The identity of the host memory of a device's machine."""
    return f"cpu@{host_of(identity)}"


def in_host_memory(identity: str) -> bool:
    """Whether a device identity is a CPU slot's or host memory, not a GPU's."""
    return identity.startswith("cpu@")


def device_name(device: torch.device) -> str:
    """The marketing name of the GPU, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"

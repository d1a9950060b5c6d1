"""Accelerator slots: a CUDA GPU, or a CPU slot (a Ray custom resource with a memory budget).

Invariant: importing this needs no torch, so that Ray can start meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from nemo_rl.config.errors import UserError

if TYPE_CHECKING:
    import torch

DeviceKind = Literal["cuda", "cpu"]
CPU_SLOT_RESOURCE = "cpu_slot"
SLOT_BYTES_VARIABLE = "NRL_SLOT_BYTES"
"""Tells a worker how much device memory its slot has, where neighbours use the rest of the GPU."""


class DeviceUnavailableError(UserError, RuntimeError):
    """The configured device does not exist on this machine."""


@dataclass(frozen=True)
class Accelerator:
    """One kind of accelerator slot."""

    kind: DeviceKind  # `cuda` or `cpu`, also the torch device type
    ray_resource: str  # name of the Ray resource of which one slot takes 1.0
    process_group_backend: str  # torch.distributed backend string for this kind

    @property
    def is_cuda(self) -> bool:
        """Whether slots are GPUs."""
        return self.kind == "cuda"

    def torch_device(self) -> torch.device:
        """The device of this process: its first visible GPU, or the CPU."""
        import torch

        return torch.device("cuda", 0) if self.is_cuda else torch.device("cpu")


CUDA = Accelerator("cuda", "GPU", "cpu:gloo,cuda:nccl")
CPU = Accelerator("cpu", CPU_SLOT_RESOURCE, "gloo")


def resolve_accelerator(device: str, *, cluster_gpus: float | None = None) -> Accelerator:
    """Turns `cluster.device` into an accelerator.

    Args:
        device: `auto`, `cuda` or `cpu`.
        cluster_gpus: GPUs of a Ray cluster that is already joined; without one, this machine's GPUs decide.

    Raises DeviceUnavailableError: `cuda` was asked for and there is no GPU.
    """
    if device == "cpu":
        return CPU
    gpus = _gpus_here() if cluster_gpus is None else cluster_gpus
    if device == "auto" and not gpus:
        return CPU
    if not gpus:
        raise DeviceUnavailableError(
            "cluster.device=cuda, but no GPU is visible here; set cluster.device=cpu "
            "(examples/configs/grpo_arithmetic_cpu.yaml is a run made for it) or join a cluster with GPUs"
        )
    return CUDA


def _gpus_here() -> int:
    import torch

    # Asks NVML. `is_available` would start CUDA here, and make this process a client of the Multi-Process Service.
    return torch.cuda.device_count()


def least_device_bytes() -> int:
    """Memory of the smallest GPU of this machine, bytes; takes no context on any."""
    import pynvml

    pynvml.nvmlInit()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return min(int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles)
    finally:
        pynvml.nvmlShutdown()

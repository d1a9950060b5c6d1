"""Makes a transport's two ends by name, in one place."""

from __future__ import annotations

import torch

from nemo_rl.distributed.devices import host_of
from nemo_rl.weight_sync.transports.base import Opener, Staging, TransportError, TransportName


def make_staging(name: TransportName, nbytes: int, device: torch.device) -> Staging:
    """A sender's buffer of `nbytes` bytes.

    Raises:
        TransportError: The transport does not work on this device, or memory is short.
    """
    if name == "host":
        from nemo_rl.weight_sync.transports.host import HostStaging

        return HostStaging(nbytes, device)
    if name == "cuda_ipc":
        from nemo_rl.weight_sync.transports.cuda_ipc import CudaIpcStaging

        return CudaIpcStaging(nbytes, device)
    from nemo_rl.weight_sync.transports.nccl import NcclStaging

    return NcclStaging(nbytes, device)


def make_opener(name: TransportName, device: torch.device) -> Opener:
    """A receiver's end that needs no group.

    Raises:
        TransportError: The transport needs a group (nccl).
    """
    if name == "host":
        from nemo_rl.weight_sync.transports.host import HostOpener

        return HostOpener(device)
    if name == "cuda_ipc":
        from nemo_rl.weight_sync.transports.cuda_ipc import CudaIpcOpener

        return CudaIpcOpener(device)
    raise TransportError(f"transport {name!r} opens only inside a session's group")


def choose_transport(configured: str, *, sender_devices: set[str], target_devices: set[str], cuda: bool) -> TransportName:
    """The transport for one set of targets.

    Args:
        configured: `weight_sync.transport`.
        sender_devices: Device identities of the ranks that can stage.
        target_devices: Device identities of the targets.
        cuda: Whether slots are GPUs.

    Raises:
        TransportError: The configured transport cannot reach these targets.
    """
    if not cuda:
        if configured not in ("auto", "host"):
            raise TransportError(f"weight_sync.transport={configured} needs GPUs; on CPU slots use auto or host")
        return "host"
    shared = target_devices <= sender_devices
    same_host = {host_of(device) for device in target_devices} <= {host_of(device) for device in sender_devices}
    if configured == "auto":
        # Pinned shared memory reaches every GPU of a host without a communicator; NCCL is for what lies beyond it.
        return "cuda_ipc" if shared else "host" if same_host else "nccl"
    if configured == "cuda_ipc" and not shared:
        raise TransportError("weight_sync.transport=cuda_ipc reaches only targets on the trainer's own GPUs; use auto or nccl for separate placement")
    if configured == "nccl" and target_devices & sender_devices:
        raise TransportError("weight_sync.transport=nccl cannot put two ranks on one GPU; use auto or cuda_ipc for colocated placement")
    if configured == "host" and not same_host:
        raise TransportError("weight_sync.transport=host reaches only targets on the trainer's own nodes; use auto or nccl across nodes")
    if configured not in ("cuda_ipc", "nccl", "host"):
        raise TransportError(f"weight_sync.transport={configured} is unknown; choose auto, cuda_ipc, nccl or host")
    return configured

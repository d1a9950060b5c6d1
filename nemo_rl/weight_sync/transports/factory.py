"""Makes a transport's two ends by name, in one place."""

from __future__ import annotations

import torch

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

"""Keys of `weight_sync.*`: how weights travel from training to generation.

Knows the names of the transports, not the transports.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from nemo_rl.config.section import Section


class WeightSyncConfig(Section):
    """`weight_sync.*`."""

    transport: Literal["auto", "cuda_ipc", "nccl", "host"] = Field(
        "auto",
        description="Transport to each target device: auto chooses; cuda_ipc and host refuse targets they cannot reach; "
        "nccl makes a group of the other GPUs, and reaches the sender's own GPU by CUDA IPC.",
    )
    bucket_bytes: PositiveInt = Field(
        256 * 1024**2, description="Size of a bucket. By host, two of them are staged in shared memory; on GPUs as many as policy.refit_buffer_size_gb allows."
    )
    verify: bool = Field(False, description="Compare checksums of both sides after each sync.")
    timeout_s: float = Field(150.0, gt=0, description="Seconds that a whole sync may take.")

"""Keys of `weight_sync.*`: how weights travel from training to generation.

Knows the names of the transports, not the transports.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from nemo_rl.config.section import Section


class WeightSyncConfig(Section):
    """`weight_sync.*`."""

    transport: Literal["auto", "cuda_ipc", "nccl", "host"] = Field("auto", description="Transport; auto chooses per target.")
    bucket_bytes: PositiveInt = Field(256 * 1024**2, description="Bytes staged at a time.")
    verify: bool = Field(False, description="Compare checksums of both sides after each sync.")
    timeout_s: float = Field(150.0, gt=0, description="Seconds that a whole sync may take.")

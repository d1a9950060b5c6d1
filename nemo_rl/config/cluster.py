"""Keys of `cluster.*`: how many accelerator slots the run takes, of which kind, and the ports it may use.

Says what is asked for; what is there is decided by `nemo_rl.distributed`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from nemo_rl.config.section import Section


class ClusterConfig(Section):
    """`cluster.*`."""

    gpus_per_node: PositiveInt = Field(1, description="Accelerator slots per node: GPUs, or CPU slots with device cpu.")
    num_nodes: PositiveInt = Field(1, description="Nodes.")
    master_port_range_low: int = Field(1400, ge=1, le=65535, description="First port for process groups.")
    master_port_range_high: int = Field(1999, ge=1, le=65535, description="Last port for process groups.")
    segment_size: PositiveInt | None = Field(
        None, description="Accepted from older recipes; no effect: Ray does not know NVLink segments, so nodes are taken wherever their slots are free."
    )
    device: Literal["auto", "cuda", "cpu"] = Field("auto", description="Kind of accelerator slot; auto takes CUDA where there is a GPU.")
    cpu_slots: PositiveInt = Field(2, description="Accelerator slots that a machine without GPUs offers.")
    cpu_slot_memory_gb: float = Field(4, gt=0, description="Memory budget of one CPU slot, in GB.")

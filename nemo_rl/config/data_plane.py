"""Keys of `data_plane.*`: rollouts in TransferQueue instead of the driver's memory.

Capacities are in rows; segment and buffer sizes are in bytes.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from nemo_rl.config.section import NotYet, Section


class ObservabilityConfig(Section):
    """`data_plane.observability`."""

    enabled: bool = Field(False, description="Count bytes, keys and operations of the data plane, in the log and as Prometheus metrics.")


class DataPlaneConfig(Section):
    """`data_plane.*`."""

    enabled: bool = Field(False, description="Keep rollouts in the data plane.")
    impl: Literal["transfer_queue"] = Field("transfer_queue", description="Implementation.")
    backend: Literal["simple", "mooncake_cpu"] = Field("simple", description="Storage behind TransferQueue: its own actors, or Mooncake in the hosts' memory.")
    storage_capacity: PositiveInt = Field(1_000_000, description="simple: most rows stored at a time, all partitions together.")
    num_storage_units: PositiveInt = Field(2, description="simple: storage actors, spread over the nodes.")
    claim_meta_poll_interval_s: float = Field(0.5, gt=0, description="Seconds between looks for rows or for space that are not there yet.")
    full_wait_s: float = Field(60.0, ge=0, description="Seconds a write waits for space before it fails.")
    global_segment_size: PositiveInt | None = Field(
        None, description="mooncake_cpu: bytes of the segment that each process adds to the store; null: a 32nd of the host's memory."
    )
    local_buffer_size: PositiveInt | None = Field(None, description="mooncake_cpu: bytes of each process's buffer; null: a 128th of the host's memory.")
    controller_address: Annotated[str | None, NotYet("joining a data plane that another run started")] = Field(
        None, description="Address of a running controller; null starts one."
    )
    ack_timeout_ms: PositiveInt | None = Field(None, description="Milliseconds that an operation of the data plane may take; null: 120,000.")
    observability: ObservabilityConfig = Field(ObservabilityConfig(), description="Counters.")

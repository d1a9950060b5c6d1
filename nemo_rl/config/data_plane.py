"""Keys of `data_plane.*`: rollouts in TransferQueue instead of the driver's memory.

Capacities are in rows; segment and buffer sizes are in bytes.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from nemo_rl.config.section import Section


class ObservabilityConfig(Section):
    """`data_plane.observability`."""

    enabled: bool = Field(False, description="Count bytes, keys and operations of the data plane.")


class DataPlaneConfig(Section):
    """`data_plane.*`."""

    enabled: bool = Field(False, description="Keep rollouts in the data plane.")
    impl: Literal["transfer_queue"] = Field("transfer_queue", description="Implementation.")
    backend: Literal["simple", "mooncake_cpu"] = Field("simple", description="Storage behind TransferQueue.")
    storage_capacity: PositiveInt = Field(1_000_000, description="Rows per partition.")
    num_storage_units: PositiveInt = Field(2, description="Storage actors.")
    claim_meta_poll_interval_s: float = Field(0.5, gt=0, description="Seconds between polls for rows that are not there yet.")
    global_segment_size: PositiveInt = Field(549_755_813_888, description="mooncake_cpu: bytes of the shared segment.")
    local_buffer_size: PositiveInt = Field(68_719_476_736, description="mooncake_cpu: bytes of each client's buffer.")
    controller_address: str | None = Field(None, description="Address of a running controller; null starts one.")
    ack_timeout_ms: PositiveInt | None = Field(None, description="Milliseconds to wait for an acknowledgement; null: the implementation's own.")
    observability: ObservabilityConfig = Field(ObservabilityConfig(), description="Counters.")

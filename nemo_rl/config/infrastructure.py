"""Keys of a run's infrastructure: `cluster.*`, `logger.*`, `data_plane.*`, `weight_sync.*` and `checkpointing.*`.

Accelerators and ports, where metrics go, where rollouts lie, how weights travel, which checkpoints are written and kept
(`nemo_rl.utils.checkpoint` decides). Knows names of backends and transports, not the backends. Capacities are in rows,
sizes in bytes, times in seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from nemo_rl.config.section import NotYet, Section

ResumeChange = Literal["data", "environment", "loss", "model", "optimizer", "batch", "seed", "intact"]


class ClusterConfig(Section):
    """`cluster.*`."""

    gpus_per_node: PositiveInt = Field(1, description="Accelerator slots per node: GPUs, or CPU slots with device cpu.")
    num_nodes: PositiveInt = Field(1, description="Nodes.")
    master_port_range_low: int = Field(1400, ge=1, le=65535, description="First port for process groups.")
    master_port_range_high: int = Field(1999, ge=1, le=65535, description="Last port for process groups.")
    segment_size: PositiveInt | None = None
    """Accepted from older recipes; no effect: Ray does not know NVLink segments, so nodes are taken wherever their
    slots are free.
    """
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Kind of accelerator slot; auto takes CUDA where there is a GPU."""
    cpu_slots: PositiveInt = Field(2, description="Accelerator slots that a machine without GPUs offers.")
    cpu_slot_memory_gb: float = Field(4, gt=0)
    """Memory by which KV caches on a CPU slot are sized, in GB: a quarter of it; it limits no process."""


class WandbConfig(Section):
    """`logger.wandb`; further keys pass to wandb.init."""

    model_config = ConfigDict(extra="allow")

    project: str = Field("grpo-dev", description="Project.")
    name: str = Field("grpo-dev-logger", description="Run name.")
    entity: str | None = Field(None, description="Team or user; null: the default one.")
    log_nemo_gym_full_result_tables: Annotated[bool, NotYet("NeMo-Gym")] = False
    """Upload NeMo-Gym's result tables."""


class SwanlabConfig(Section):
    """`logger.swanlab`; further keys pass to swanlab.init."""

    model_config = ConfigDict(extra="allow")

    project: str = Field("grpo-dev", description="Project.")
    name: str = Field("grpo-dev-logger", description="Run name.")


class MlflowConfig(Section):
    """`logger.mlflow`."""

    experiment_name: str = Field("grpo-dev", description="Experiment.")
    run_name: str | None = Field("grpo-dev-logger", description="Run name.")
    run_id: str | None = Field(None, description="Run to continue.")
    tracking_uri: str | None = Field(None, description="Tracking server; null: a local directory.")
    artifact_location: str | None = Field(None, description="Where artifacts go.")


class GpuMonitoringConfig(Section):
    """`logger.gpu_monitoring`."""

    collection_interval: float = Field(10, gt=0, description="Seconds between samples.")
    flush_interval: float = Field(10, gt=0, description="Seconds between writes to the log.")


class LoggerConfig(Section):
    """`logger.*`."""

    log_dir: str = Field("logs", description="Directory of logs; each run takes the next exp_NNN in it.")
    num_val_samples_to_print: NonNegativeInt = 0
    """Validation samples shown on the terminal per validation, from best to worst."""
    wandb_enabled: bool = Field(False, description="Log to Weights & Biases.")
    tensorboard_enabled: bool = Field(False, description="Log to TensorBoard.")
    mlflow_enabled: bool = Field(False, description="Log to MLflow.")
    swanlab_enabled: bool = Field(False, description="Log to SwanLab.")
    wandb: WandbConfig = Field(WandbConfig(), description="Weights & Biases.")
    tensorboard: dict[str, object] = Field(default_factory=dict)
    """Arguments of TensorBoard's SummaryWriter."""
    mlflow: MlflowConfig = Field(MlflowConfig(), description="MLflow.")
    swanlab: SwanlabConfig = Field(SwanlabConfig(), description="SwanLab.")
    monitor_gpus: bool = Field(True, description="Sample accelerator and memory use.")
    gpu_monitoring: GpuMonitoringConfig = Field(GpuMonitoringConfig(), description="Sampling of accelerator use.")


class ObservabilityConfig(Section):
    """`data_plane.observability`."""

    enabled: bool = False
    """Count bytes, keys and operations of the data plane, in the log and as Prometheus metrics."""
    host: str = Field("127.0.0.1", description="Address on which the driver serves its counters; others need a token.")
    token: str | None = Field(None, min_length=8)
    """What a reader of the counters sends as Authorization: Bearer; null: nothing."""

    @model_validator(mode="after")
    def _others_need_a_token(self) -> ObservabilityConfig:
        if self.token is None and self.host not in ("127.0.0.1", "localhost", "::1"):
            raise ValueError(
                f"host={self.host!r} opens the counters to the network: set data_plane.observability.token, for "
                "example to ${oc.env:METRICS_TOKEN}"
            )
        return self


class DataPlaneConfig(Section):
    """`data_plane.*`."""

    enabled: bool = Field(False, description="Keep rollouts in the data plane.")
    impl: Literal["transfer_queue"] = Field("transfer_queue", description="Implementation.")
    backend: Literal["simple", "mooncake_cpu"] = "simple"
    """Storage behind TransferQueue: its own actors, or Mooncake in the hosts' memory."""
    storage_capacity: PositiveInt = 1_000_000
    """simple: most rows stored at a time, all partitions together."""
    num_storage_units: PositiveInt = Field(2, description="simple: storage actors, spread over the nodes.")
    claim_meta_poll_interval_s: float = Field(0.5, gt=0)
    """Seconds between looks for space in a full storage."""
    full_wait_s: float = Field(60.0, ge=0, description="Seconds a write waits for space before it fails.")
    global_segment_size: PositiveInt | None = None
    """mooncake_cpu: bytes of the segment that each process adds to the store; null: a 32nd of the host's memory."""
    local_buffer_size: PositiveInt | None = None
    """mooncake_cpu: bytes of each process's buffer; null: a 128th of the host's memory."""
    controller_address: Annotated[str | None, NotYet("joining a data plane that another run started")] = None
    """Address of a running controller; null starts one."""
    ack_timeout_ms: PositiveInt | None = None
    """Milliseconds that an operation of the data plane may take; null: 120,000."""
    observability: ObservabilityConfig = Field(ObservabilityConfig(), description="Counters.")


class WeightSyncConfig(Section):
    """`weight_sync.*`."""

    transport: Literal["auto", "cuda_ipc", "nccl", "host", "tcp"] = "auto"
    """Transport to each target device: auto chooses; cuda_ipc and host refuse targets they cannot reach; nccl makes a
    group of the other GPUs, and reaches the sender's own GPU by CUDA IPC; tcp sends from host memory to host memory.
    """
    bucket_bytes: PositiveInt = 256 * 1024**2
    """Size of a bucket. By host, two of them are staged in shared memory; on GPUs as many as
    policy.refit_buffer_size_gb allows.
    """
    verify: bool = Field(False, description="Compare checksums of both sides after each sync.")
    timeout_s: float = Field(150.0, gt=0, description="Seconds that a whole sync may take.")


def _as_text(path: object) -> object:
    return str(path) if isinstance(path, Path) else path


class CheckpointingConfig(Section):
    """`checkpointing.*`."""

    enabled: bool = Field(True, description="Write checkpoints.")
    checkpoint_dir: Annotated[str, BeforeValidator(_as_text)] = "results/grpo"
    """Directory of the step_N checkpoints; a run continues from the highest one there."""
    metric_name: str | None = "val:accuracy"
    """Metric that ranks checkpoints, as val:<name> or train:<name>; null: age."""
    higher_is_better: bool = Field(True, description="Whether a higher metric is better.")
    keep_top_k: PositiveInt | None = Field(3, description="Best checkpoints kept; null keeps all.")
    save_period: PositiveInt = Field(10, description="RL steps between checkpoints.")
    checkpoint_must_save_by: str | None = Field(None, pattern=r"^\d+:\d+:\d+:\d+$")
    """Run time (DD:HH:MM:SS) by which a checkpoint must be written; the run then ends."""
    model_save_format: Literal["safetensors", "torch_save"] | None = "safetensors"
    """Format of the weights; null: safetensors."""
    save_consolidated: bool = False
    """Accepted from older recipes; no effect: the weights of every checkpoint are one Hugging Face directory already.
    """
    resume: list[ResumeChange] = Field(default_factory=list)
    """What may differ from the checkpoint that a run goes on from, a name or a list: data, environment, loss, model,
    optimizer (its class), batch (prompts per step), seed. Other changes are obeyed without it. intact passes over
    damaged checkpoints, which are kept as damaged_step_N.
    """
    save_on_signal: bool = False
    """On the first Ctrl-C or SIGTERM finish the step, write a checkpoint and end; on the second end at once. Off: end
    at once.
    """
    save_optimizer: bool = Field(True, description="Write the optimizer's state.")
    ft_save_period: PositiveInt | None = None
    """RL steps between extra checkpoints for restarts; null writes none."""
    ft_keep_latest_k: PositiveInt | None = Field(None, description="Newest extra checkpoints kept.")
    model_cache_dir: str | None = None
    """Accepted from older recipes; no effect: downloads go to Hugging Face's own cache, which HF_HOME places."""
    model_repo_id: str | None = None
    """Accepted from older recipes; no effect: a checkpoint holds the model's whole configuration, and config.yaml names
    policy.model_name.
    """
    is_peft: bool = False
    """Accepted from older recipes; no effect: checkpoints hold adapters where policy.dtensor_cfg.lora_cfg.enabled or
    policy.megatron_cfg.peft.enabled.
    """
    is_async: bool = Field(False, description="Accepted from older recipes; checkpoints never block the step here.")
    pretrained_checkpoint: Annotated[
        dict[str, object] | None, NotYet("Megatron checkpoints as a start", regardless=True)
    ] = Field(None, description="Megatron checkpoint to start from: path, and format megatron_bridge or megatron_lm.")

    @field_validator("resume", mode="before")
    @classmethod
    def _one_name_is_a_list(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

"""Keys of `logger.*`: where metrics, samples and curves go.

Knows the backends' names, not the backends.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field, NonNegativeInt

from nemo_rl.config.section import NotYet, Section


class WandbConfig(Section):
    """`logger.wandb`; further keys pass to wandb.init."""

    model_config = ConfigDict(extra="allow")

    project: str = Field("grpo-dev", description="Project.")
    name: str = Field("grpo-dev-logger", description="Run name.")
    entity: str | None = Field(None, description="Team or user; null: the default one.")
    log_nemo_gym_full_result_tables: Annotated[bool, NotYet("NeMo-Gym")] = Field(False, description="Upload NeMo-Gym's result tables.")


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
    num_val_samples_to_print: NonNegativeInt = Field(0, description="Validation samples shown on the terminal per validation, from best to worst.")
    wandb_enabled: bool = Field(False, description="Log to Weights & Biases.")
    tensorboard_enabled: bool = Field(False, description="Log to TensorBoard.")
    mlflow_enabled: bool = Field(False, description="Log to MLflow.")
    swanlab_enabled: bool = Field(False, description="Log to SwanLab.")
    wandb: WandbConfig = Field(WandbConfig(), description="Weights & Biases.")
    tensorboard: dict[str, Any] = Field(default_factory=dict, description="Arguments of TensorBoard's SummaryWriter.")
    mlflow: MlflowConfig = Field(MlflowConfig(), description="MLflow.")
    swanlab: SwanlabConfig = Field(SwanlabConfig(), description="SwanLab.")
    monitor_gpus: bool = Field(True, description="Sample accelerator and memory use.")
    gpu_monitoring: GpuMonitoringConfig = Field(GpuMonitoringConfig(), description="Sampling of accelerator use.")

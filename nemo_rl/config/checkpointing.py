"""Keys of `checkpointing.*`: where and when checkpoints are written, in which format, and which are kept.

Retention is decided by `nemo_rl.utils.checkpoint`; this file names its switches.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, field_validator

from nemo_rl.config.section import NotYet, Section

ResumeChange = Literal["data", "environment", "loss", "model", "optimizer", "batch", "seed"]


class CheckpointingConfig(Section):
    """`checkpointing.*`."""

    enabled: bool = Field(True, description="Write checkpoints.")
    checkpoint_dir: str = Field(
        "results/grpo", description="Directory of the step_N checkpoints; a run continues from the highest one there."
    )
    metric_name: str | None = Field(
        "val:accuracy",
        pattern=r"^(val|train):.+$",
        description="Metric that ranks checkpoints, as val:<name> or train:<name>; null: age.",
    )
    higher_is_better: bool = Field(True, description="Whether a higher metric is better.")
    keep_top_k: PositiveInt | None = Field(3, description="Best checkpoints kept; null keeps all.")
    save_period: PositiveInt = Field(10, description="RL steps between checkpoints.")
    checkpoint_must_save_by: str | None = Field(
        None,
        pattern=r"^\d+:\d+:\d+:\d+$",
        description="Run time (DD:HH:MM:SS) by which a checkpoint must be written; the run then ends.",
    )
    model_save_format: Literal["safetensors", "torch_save"] | None = Field(
        "safetensors", description="Format of the weights; null: safetensors."
    )
    save_consolidated: bool = Field(
        False,
        description="Accepted from older recipes; no effect: the weights of every checkpoint are one Hugging "
        "Face directory already.",
    )
    resume: list[ResumeChange] = Field(
        default_factory=list,
        description="What may differ from the checkpoint that a run goes on from, a name or a list: data, environment, "
        "loss, model, optimizer (its class), batch (prompts per step), seed. Other changes are obeyed without it.",
    )
    save_on_signal: bool = Field(
        False,
        description="On the first Ctrl-C or SIGTERM finish the step, write a checkpoint and end; on the second end "
        "at once. Off: end at once.",
    )
    save_optimizer: bool = Field(True, description="Write the optimizer's state.")
    ft_save_period: PositiveInt | None = Field(
        None, description="RL steps between extra checkpoints for restarts; null writes none."
    )
    ft_keep_latest_k: PositiveInt | None = Field(None, description="Newest extra checkpoints kept.")
    model_cache_dir: str | None = Field(
        None,
        description="Accepted from older recipes; no effect: downloads go to Hugging Face's own cache, which "
        "HF_HOME places.",
    )
    model_repo_id: str | None = Field(
        None,
        description="Accepted from older recipes; no effect: a checkpoint holds the model's whole "
        "configuration, and config.yaml names policy.model_name.",
    )
    is_peft: bool = Field(
        False,
        description="Accepted from older recipes; no effect: checkpoints hold adapters where "
        "policy.dtensor_cfg.lora_cfg.enabled.",
    )
    is_async: bool = Field(False, description="Accepted from older recipes; checkpoints never block the step here.")
    pretrained_checkpoint: Annotated[
        dict[str, object] | None, NotYet("Megatron checkpoints as a start", regardless=True)
    ] = Field(None, description="Megatron checkpoint to start from: path, and format megatron_bridge or megatron_lm.")

    @field_validator("resume", mode="before")
    @classmethod
    def _one_name_is_a_list(cls, value: object) -> Any:
        return [value] if isinstance(value, str) else value

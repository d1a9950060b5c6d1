"""Keys of `async_rl.*`: the streaming single controller.

Times are in seconds. Which bounds must hold between them is decided where they are honoured.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt

from nemo_rl.config.section import NotYet, Section


class SamplerConfig(Section):
    """`async_rl.sampler`; a custom sampler gets its further keys."""

    model_config = ConfigDict(extra="allow")

    name: Literal["in_order", "ready_first", "weight_fifo", "windowed", "custom"] = "in_order"
    """Which ready prompt groups are trained next."""
    max_lookahead_versions: NonNegativeInt = 1
    """in_order: how many versions ahead prompts are dispatched."""
    max_staleness_versions: NonNegativeInt = Field(1, description="Others: how many versions old a group may be.")
    sample_freshest_first: bool = Field(False, description="windowed: newest groups first.")
    target: str | None = Field(None, description="custom: module:Class.")

    def max_staleness(self) -> int | None:
        """Largest age of a group in versions when it is trained; None where the sampler sets no bound, or its own."""
        bounds = {"in_order": self.max_lookahead_versions, "ready_first": None, "custom": None}
        return bounds.get(self.name, self.max_staleness_versions)


class NativeTimeoutsConfig(Section):
    """`async_rl.rollout_failure.native`."""

    generation_timeout_s: float | None = Field(None, gt=0, description="Deadline of one generation; null has none.")
    env_timeout_s: float | None = Field(None, gt=0, description="Deadline of one environment step; null has none.")


class GymTimeoutsConfig(Section):
    """`async_rl.rollout_failure.nemo_gym`."""

    rollout_timeout_s: float | None = Field(None, gt=0, description="Deadline of one rollout; null has none.")
    max_row_attempts: PositiveInt = Field(3, description="Attempts per row.")


class RolloutFailureConfig(Section):
    """`async_rl.rollout_failure`."""

    max_infra_attempts_per_prompt: PositiveInt = Field(5, description="Attempts after failures of the machinery.")
    max_data_attempts_per_prompt: PositiveInt = Field(2, description="Attempts after failures of the prompt itself.")
    backoff_base_s: float = Field(1, gt=0, description="First pause between attempts.")
    max_backoff_s: float = Field(30, gt=0, description="Longest pause between attempts.")
    max_skipped_prompts: NonNegativeInt = Field(0, description="Prompts that a run may skip.")
    max_consecutive_dropped_prompts: NonNegativeInt = Field(0, description="Prompts that may be dropped in a row.")
    min_step_batch_fraction: float = Field(0.9, gt=0, le=1, description="Share of a step's prompts that must remain.")
    on_dropped_prompt: Literal["shrink", "replace"] = "shrink"
    """Train on fewer prompts, or take others."""
    max_replacement_attempts: Annotated[NonNegativeInt, NotYet("dropping and replacing prompts")] = 1
    """Replacements per dropped prompt."""
    replacement_reserve_prompts: Annotated[NonNegativeInt, NotYet("dropping and replacing prompts")] = 1
    """Prompts held in reserve."""
    native: NativeTimeoutsConfig = Field(NativeTimeoutsConfig(), description="Deadlines of this package's rollouts.")
    nemo_gym: Annotated[GymTimeoutsConfig, NotYet("NeMo-Gym trajectories")] = GymTimeoutsConfig()
    """Deadlines of NeMo-Gym's rollouts."""


class StallWatchdogConfig(Section):
    """`async_rl.stall_watchdog`."""

    interval_s: float = Field(30, gt=0, description="Accepted with any value; a stall is seen when it happens.")
    stall_timeout_s: float = Field(600, gt=0, description="Seconds without progress that count as a stall.")
    stall_action: Literal["warn", "abort"] = Field("warn", description="What a stall does.")
    gym_subprocess_check: bool = True
    """Accepted with any value; an episode fails by name when a server of NeMo-Gym has ended."""


class GenerationFleetHealthConfig(Section):
    """`async_rl.generation_fleet_health`."""

    enabled: bool = Field(False, description="Probe the generation engines.")
    probe_interval_s: float = Field(5, gt=0, description="Seconds between probes.")
    probe_timeout_s: float = Field(2, gt=0, description="Deadline of a probe.")
    unhealthy_threshold: PositiveInt = Field(3, description="Failed probes in a row that make an engine unhealthy.")
    healthy_threshold: PositiveInt = Field(2, description="Good probes in a row that make it healthy again.")
    selection: str = Field("least_outstanding", description="How requests are dealt to healthy engines.")
    on_dead_shard: Literal["fail_fast", "restart"] = Field("fail_fast", description="What a dead engine does.")
    max_restart_attempts_per_shard: NonNegativeInt = Field(5, description="Restarts per engine.")
    min_healthy_shards: PositiveInt = Field(1, description="Engines that must stay healthy.")


class GenerationRouterConfig(Section):
    """`async_rl.generation_router`."""

    enabled: bool = Field(False, description="Serve one address in front of the engines (NeMo-Gym).")
    port_range_low: int = Field(6000, ge=1, le=65535, description="First port.")
    port_range_high: int = Field(6099, ge=1, le=65535, description="Last port.")
    backend_timeout_s: float = Field(600, gt=0, description="Deadline of a request.")
    connect_timeout_s: float = Field(5, gt=0, description="Deadline of a connection.")
    no_healthy_backend_status: int = Field(409, description="HTTP status when no engine is healthy.")


class AsyncRLConfig(Section):
    """`async_rl.*`: the streaming single controller."""

    sampler: SamplerConfig = Field(SamplerConfig(), description="Choice of groups to train.")
    min_groups_for_streaming_train: PositiveInt = Field(32, description="Prompt groups that start a training chunk.")
    min_prompt_groups_per_batch: PositiveInt | None = None
    """Another name of min_groups_for_streaming_train, which it overrides."""
    target_prompt_groups_per_step: PositiveInt | None = None
    """Another name of grpo.num_prompts_per_step, which it must equal."""
    max_inflight_prompts: PositiveInt = Field(32, description="Prompts generated at a time.")
    max_buffered_rollouts: PositiveInt = 64
    """Prompt groups that may wait for training; must hold what the sampler looks ahead, and has no effect beyond that.
    """
    recompute_kv_cache_after_weight_updates: bool = False
    """Drop the KV cache of running requests after a refit."""
    diagnostics: Annotated[bool, NotYet("the controller's inner state in the log")] = False
    """Log the controller's inner state."""
    rollout_failure: RolloutFailureConfig = Field(RolloutFailureConfig(), description="What failed rollouts do.")
    stall_watchdog: StallWatchdogConfig = Field(StallWatchdogConfig(), description="What a stall does.")
    generation_fleet_health: Annotated[GenerationFleetHealthConfig, NotYet("probes of engines")] = (
        GenerationFleetHealthConfig()
    )
    """Health of the engines."""
    generation_router: Annotated[GenerationRouterConfig, NotYet("an address in front of the engines")] = (
        GenerationRouterConfig()
    )
    """One address in front of the engines."""

"""Writes what a completed step was like, in the background, while the next step generates.

Invariants: steps are written in their order; an error is raised by the next call; the report of a step clears its rows
in the store; sample files are best effort.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nemo_rl.algorithms.grpo.metrics import throughput_metrics
from nemo_rl.algorithms.grpo.rewards import RewardWatch
from nemo_rl.algorithms.grpo.stages import Experience, needs_previous_logprobs
from nemo_rl.config import MasterConfig
from nemo_rl.experience.columns import sample_starts
from nemo_rl.experience.environment_batcher import environment_metrics_of_step
from nemo_rl.experience.sample_log import SampleFiles, sample_log_stage
from nemo_rl.experience.store import ExperienceStore, TokenStage
from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration
from nemo_rl.models.policy.interfaces import TrainResult
from nemo_rl.utils.backlog import Backlog
from nemo_rl.utils.logger import Logger
from nemo_rl.utils.progress import RunProgress
from nemo_rl.utils.record import Record

if TYPE_CHECKING:
    from nemo_rl.models.policy.interfaces import BatchHandle


@dataclass(frozen=True)
class DeviceCount:
    """Accelerator slots of the run."""

    total: int
    training: int
    generation: int


@dataclass(frozen=True)
class StepReport:
    """A completed step as it is reported."""

    step: int  # its number, from 1
    experience: Experience  # the trained experience; the report clears its rows in the store
    metrics: Mapping[str, float]  # its `train/` metrics
    result: TrainResult
    seconds: Mapping[str, float]
    refit: Mapping[str, float]  # metrics of the last refit


@dataclass
class StepReports:
    """Reports the steps of one run."""

    config: MasterConfig
    store: ExperienceStore
    logger: Logger
    record: Record
    progress: RunProgress
    generation: VllmGeneration | None
    devices: DeviceCount
    backlog: Backlog = field(default_factory=lambda: Backlog("step-report"))
    rewards: RewardWatch = field(default_factory=RewardWatch)  # warns about steps that teach nothing
    files: SampleFiles = field(default_factory=SampleFiles)

    def put(self, report: StepReport) -> None:
        """Writes a step. Waits for the step before, and raises what its report raised."""
        self.backlog.put(lambda: self._write(report))

    def put_samples(self, handle: BatchHandle, stage: TokenStage) -> None:
        """Writes the samples of a batch by `stage`, and clears its rows."""

        def write() -> None:
            try:
                with self.files.best_effort():
                    self.store.apply(handle, stage)
            finally:
                self.store.clear(handle)

        self.store.keep(handle)
        self.backlog.put(write)

    def wait(self) -> None:
        """Waits until everything is written. Raises what a report raised; BacklogStuck: it takes too long."""
        self.backlog.wait()

    def close(self) -> None:
        """Waits for the running report, and ends the thread; logs its error. Safe to call twice."""
        self.backlog.close()

    def _write(self, report: StepReport) -> None:
        try:
            self._log_metrics(report)
            self._say(report)
            self._write_samples(report)
        finally:
            self.store.clear(report.experience.handle)
        self.record.flush()

    def _log_metrics(self, report: StepReport) -> None:
        step, rows, seconds, generation = report.step, report.experience.rows, report.seconds, self.generation
        self.logger.log_metrics(report.metrics, step, prefix="train")
        self.logger.log_metrics(environment_metrics_of_step(), step, prefix="environment")
        if generation is not None:
            self.logger.log_metrics(report.refit, step, prefix="refit")
            if self.config.policy.generation.vllm_cfg.enable_vllm_metrics_logger:
                self.logger.log_metrics(generation.engine_metrics(), step, prefix="generation_metrics")
        performance = throughput_metrics(
            int(sample_starts(rows).sum()),
            float(rows["total_lengths"].sum()),
            seconds,
            num_devices=self.devices.total,
            train_devices=self.devices.training,
            generation_devices=self.devices.generation,
            generated_tokens=float(rows["generated_lengths"].sum()),
        )
        performance |= _utilisation(report.result, seconds)
        self.logger.log_metrics(performance, step, prefix="performance")
        self.logger.log_metrics(seconds, step, prefix="timing/train", step_finished=True)

    def _say(self, report: StepReport) -> None:
        step, rows, metrics, cfg = report.step, report.experience.rows, report.metrics, self.config
        tokens = float(rows["total_lengths"].sum())
        self.progress.step_done(step, reward=metrics["reward"], loss=metrics["loss"], tokens=tokens)
        if cfg.loss_fn.reads_advantages and cfg.grpo.adv_estimator.name != "opd":
            warning = self.rewards.observe(step, rows, metrics["global_valid_toks"])
            if warning is not None:
                self.progress.say(warning)
        for line in self.rewards.rollouts.observe(
            f"step {step}",
            metrics,
            max_new_tokens=cfg.policy.generation.max_new_tokens,
            max_turns=cfg.grpo.max_rollout_turns,
        ):
            self.progress.say(line)

    def _write_samples(self, report: StepReport) -> None:
        """Writes `samples/train_data_stepN.jsonl`: all samples with tokens, masks, rewards and log-probabilities."""
        handle, loss_fn = report.experience.handle, self.config.loss_fn
        columns = {
            "content": "content",
            "rewards": "rewards",
            "input_lengths": "input_lengths",
            "sample_mask": "sample_loss_mask",
            "input_ids": "token_ids",
            "token_mask": "token_loss_mask",
            "advantages": "advantages",
            "generation_logprobs": "generation_logprobs",
        }
        if not loss_fn.reads_advantages:
            columns.pop("advantages")
        if needs_previous_logprobs(self.config.grpo, loss_fn):
            columns["prev_logprobs"] = "prev_logprobs"
        if "conversation" in self.store.columns(handle):
            columns["conversation"] = "conversation"
        stage = sample_log_stage(self.logger.samples_dir / f"train_data_step{report.step}.jsonl", columns)
        with self.files.best_effort():
            self.store.apply(handle, stage)


def _utilisation(result: TrainResult, seconds: Mapping[str, float]) -> dict[str, float]:
    if "total_flops" not in result or not seconds.get("policy_training"):
        return {}
    per_second = result["total_flops"] / seconds["policy_training"] / result["num_ranks"]
    metrics = {"train_flops_per_gpu": per_second}
    if "theoretical_tflops" in result:
        metrics["train_fp_utilization"] = per_second / 1e12 / (result["theoretical_tflops"] / result["num_ranks"])
    return metrics

"""Metrics of a completed step, computed and written in the background while the next step generates.

Metric names are those of NeMo-RL's dashboards. Invariants: steps are written in their order; an error is raised by the
next call; the report of a step clears its rows in the store; sample files are best effort; aggregation does not depend
on the cut into microbatches, since losses normalise by global counts; the logged step is the number of completed steps,
from 1.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, SupportsFloat

import torch

from nemo_rl.algorithms.grpo.advantages import RewardWatch
from nemo_rl.algorithms.grpo.stages import Experience, needs_previous_logprobs, valid_rewards
from nemo_rl.config import GRPOConfig, MasterConfig
from nemo_rl.experience.environment_batcher import environment_metrics_of_step
from nemo_rl.experience.rollouts import rollout_metrics
from nemo_rl.experience.sample_log import SampleFiles, sample_log_stage
from nemo_rl.experience.store import ExperienceStore, TokenStage, sample_starts
from nemo_rl.loss.interfaces import is_extremum
from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration
from nemo_rl.models.policy.interfaces import TrainResult
from nemo_rl.utils.logger import Logger
from nemo_rl.utils.progress import RunProgress
from nemo_rl.utils.record import Record

if TYPE_CHECKING:
    from nemo_rl.models.policy.interfaces import BatchHandle
    from nemo_rl.utils.log_backends import Metrics

logger = logging.getLogger(__name__)


class BacklogStuck(TimeoutError):
    """A piece of work did not end by its deadline."""


class Backlog:
    """Runs one task at a time. `timeout_s`: how long a caller waits for a task."""

    def __init__(self, name: str, timeout_s: float = 300.0) -> None:
        self._name, self._timeout_s = name, timeout_s
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._running: Future[object] | None = None

    def put(self, work: Callable[[], object]) -> None:
        """Waits for the running task, then starts `work`. Raises what that task raised, without starting `work`."""
        self.wait()
        self._running = self._pool.submit(work)

    def wait(self) -> None:
        """Waits for the running task. Raises BacklogStuck after `timeout_s`, or the task's error."""
        if (error := self._outcome()) is not None:
            raise error

    def _outcome(self) -> BaseException | None:
        running, self._running = self._running, None
        if running is None:
            return None
        wait([running], timeout=self._timeout_s)
        if not running.done():
            return BacklogStuck(f"{self._name}: not done within {self._timeout_s:.0f} s")
        return running.exception()

    def close(self) -> None:
        """Waits for the running task and ends the thread; logs its error. Safe to call twice."""
        if (error := self._outcome()) is not None:
            logger.error("%s=failed", self._name, exc_info=error)
        self._pool.shutdown(wait=False)


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


_AVERAGED = frozenset(
    {"lr", "wd", "reward", "filtered_reward", "global_valid_seqs", "global_valid_toks", "mean_prompt_length"}
    | {"router_replay_share", "router_replay_changed", "moe/load_balancing_loss"}
)


def aggregate_microbatch_metrics(metrics: Mapping[str, Sequence[SupportsFloat]]) -> dict[str, float]:
    """Aggregates each metric over microbatches and ranks.

    Summed, except: values that every microbatch repeats (learning rate, weight decay, rewards, global counts, prompt
    length) are averaged, and `*_min` and `*_max` take the extremum of the finite ones, -1 when there is none.
    `metrics`: values per name, numbers or scalar tensors.
    """
    return {
        name: _aggregate(name, [float(value) for value in values]) for name, values in metrics.items() if len(values)
    }


def _aggregate(name: str, values: Sequence[float]) -> float:
    if is_extremum(name):
        finite = [value for value in values if math.isfinite(value)]
        return (min(finite) if "_min" in name else max(finite)) if finite else -1.0
    total = math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
    return total / len(values) if name in _AVERAGED else total


def batch_metrics(
    rewards_B: torch.Tensor, baseline_B: torch.Tensor, prompt_lengths_B: torch.Tensor, total_lengths_B: torch.Tensor
) -> dict[str, float]:
    """Statistics of the trained batch.

    Args:
        rewards_B: rewards of valid samples, as used for advantages.
        baseline_B: baseline of each of these; 0 (or 1) means that the rest of its group failed (or succeeded).
        total_lengths_B: tokens of each prompt with its response.

    Returns `reward`, `baseline_reward/{pct_0,pct_1,pct_mixed}` (fractions), `mean_prompt_length`, `total_num_tokens`.
    """
    zero, one = ((baseline_B == value).double().mean().item() for value in (0, 1))
    return {
        "reward": rewards_B.double().mean().item(),
        "baseline_reward/pct_0": zero,
        "baseline_reward/pct_1": one,
        "baseline_reward/pct_mixed": max(1.0 - zero - one, 0.0),
        "mean_prompt_length": prompt_lengths_B.double().mean().item(),
        "total_num_tokens": total_lengths_B.double().sum().item(),
    }


def throughput_metrics(
    samples: int,
    tokens: float,
    seconds: Mapping[str, float],
    *,
    num_devices: int,
    train_devices: int,
    generation_devices: int,
    generated_tokens: float,
) -> dict[str, float]:
    """The `performance/` metrics that follow from the times of a step.

    Args:
        tokens: tokens trained on, prompts included.
        seconds: durations by timer name (`total_step_time`, `policy_training`, `policy_and_reference_logprobs`,
            `generation`); absent or 0 gives no metric.
        generation_devices: accelerators that generate; none while rollouts are replayed.
    """
    metrics: dict[str, float] = {}

    def rate(name: str, amount: float, timer: str, devices: int) -> None:
        if seconds.get(timer, 0.0) > 0 and devices:
            metrics[name] = amount / seconds[timer]
            metrics[f"{name}_per_gpu"] = metrics[name] / devices

    rate("samples_per_sec", samples, "total_step_time", num_devices)
    rate("tokens_per_sec", tokens, "total_step_time", num_devices)
    rate("policy_training_tokens_per_sec", tokens, "policy_training", train_devices)
    rate("policy_and_reference_logprobs_tokens_per_sec", tokens, "policy_and_reference_logprobs", train_devices)
    rate("generation_tokens_per_sec", generated_tokens, "generation", generation_devices)
    training = seconds.get("policy_training", 0.0) + seconds.get("policy_and_reference_logprobs", 0.0)
    if training > 0:
        metrics["training_worker_group_tokens_per_sec"] = tokens / training
        metrics["training_worker_group_tokens_per_sec_per_gpu"] = tokens / training / train_devices
    return metrics


def validation_metrics(
    rewards_B: torch.Tensor,
    response_lengths_B: torch.Tensor,
    tasks: Sequence[str] = (),
    *,
    generations_per_prompt: int = 1,
    best_at_k: bool = False,
) -> dict[str, float]:
    """`accuracy`, `accuracy/<task>` where there are several tasks, `avg_length`, and with several generations per
    prompt `pass_k`: the fraction of prompts with one that has the full reward of 1.

    An accuracy is the mean reward; with `best_at_k` the mean over prompts of the best reward among their generations,
    beside which `mean_accuracy` is the mean reward.

    Args:
        rewards_B: rewards; the generations of a prompt are next to each other.
        tasks: the task of each sample.
        best_at_k: whether the best of k counts.
    """
    judged_B = rewards_B.view(-1, generations_per_prompt).amax(1) if best_at_k else rewards_B
    metrics = {"accuracy": judged_B.double().mean().item(), "avg_length": response_lengths_B.double().mean().item()}
    if best_at_k:
        metrics["mean_accuracy"] = rewards_B.double().mean().item()
    metrics |= accuracy_by_task(judged_B, tasks[::generations_per_prompt] if best_at_k else tasks)
    if generations_per_prompt > 1:
        solved = (rewards_B.view(-1, generations_per_prompt) >= 1).any(dim=1)
        metrics["pass_k"] = solved.double().mean().item()
    return metrics


def accuracy_by_task(rewards_B: torch.Tensor, tasks: Sequence[str]) -> dict[str, float]:
    """`accuracy/<task>`, the mean reward of each task's samples; empty for a single task. `tasks`: the task of each
    sample.
    """
    names = sorted(set(tasks))
    if len(names) < 2:
        return {}
    of_task = {name: torch.tensor([task == name for task in tasks]) for name in names}
    return {f"accuracy/{name}": rewards_B[rows].double().mean().item() for name, rows in of_task.items()}


def step_metrics(cfg: GRPOConfig, step: int, experience: Experience, result: TrainResult) -> Metrics:
    """The `train/` metrics of step `step` (from 1)."""
    rows = experience.rows
    metrics: Metrics = rollout_metrics(experience.samples) | experience.metrics
    baseline_B = rows["baseline"][rows["valid"]] if bool(rows["valid"].any()) else rows["baseline"]
    in_batch = batch_metrics(valid_rewards(rows), baseline_B, rows["prompt_lengths"], rows["total_lengths"])
    if cfg.use_dynamic_sampling:
        in_batch.pop("reward")
    metrics |= in_batch
    metrics |= aggregate_microbatch_metrics(result["all_mb_metrics"])
    # Metrics of several optimizer steps are sums over them; their mean is what one step looked like.
    steps = max(1, len(result["loss"]))
    if steps > 1:
        metrics |= {
            n: metrics[n] / steps
            for n in result["all_mb_metrics"]
            if n not in _AVERAGED and "_min" not in n and "_max" not in n
        }
    metrics["loss"] = float(result["loss"].mean())
    metrics["grad_norm"] = result["grad_norm"]
    metrics |= {key: result[key] for key in ("lr", "wd") if key in result}
    if result.get("skipped_steps"):
        metrics["skipped_steps"] = float(result["skipped_steps"])
        logger.warning(
            "step=%d optimizer=skipped reason=no_trained_token: weights, optimizer and schedule stay as they were",
            step,
        )
    return metrics

"""What a finished step reports: its metrics under their names, its times, its rates, and the samples as JSON lines.

Reads results and timers, writes to the logger. Decides nothing about the run. Invariant: the logged step is the number
of completed steps, from 1.
"""

from __future__ import annotations

from typing import Any

from nemo_rl.algorithms.grpo.metrics import aggregate_microbatch_metrics, batch_metrics, throughput_metrics
from nemo_rl.algorithms.grpo.run import GRPORun
from nemo_rl.algorithms.grpo.stages import Experience, needs_previous_logprobs
from nemo_rl.experience.sample_log import sample_log_stage
from nemo_rl.models.policy.interfaces import TrainResult


def step_metrics(run: GRPORun, experience: Experience[Any], result: TrainResult) -> dict[str, Any]:
    """The `train/` metrics of a step."""
    rows = experience.rows
    metrics: dict[str, Any] = dict(experience.metrics)
    in_batch = batch_metrics(rows["reward"], rows["baseline"], rows["prompt_lengths"], rows["total_lengths"])
    if run.config.grpo.use_dynamic_sampling:
        in_batch.pop("reward")
    metrics |= in_batch
    metrics |= aggregate_microbatch_metrics(result["all_mb_metrics"])
    # Metrics of several optimizer steps are sums over them; their mean is what one step looked like.
    steps = max(1, len(result["loss"]))
    if steps > 1:
        averaged = {"lr", "wd", "reward", "filtered_reward", "global_valid_seqs", "global_valid_toks", "mean_prompt_length"}
        metrics |= {n: metrics[n] / steps for n in result["all_mb_metrics"] if n not in averaged and "_min" not in n and "_max" not in n}
    metrics["loss"] = float(result["loss"].mean())
    metrics["grad_norm"] = result["grad_norm"]
    metrics |= {key: result[key] for key in ("lr", "wd") if key in result}
    return metrics


def log_step(run: GRPORun, experience: Experience[Any], metrics: dict[str, Any], result: TrainResult) -> None:
    """Writes metrics, times, rates and samples of the step that just completed."""
    step, rows = run.state.step, experience.rows
    run.logger.log_metrics(metrics, step, prefix="train")
    if run.refitter is not None:
        run.logger.log_metrics(run.refitter.metrics(), step, prefix="refit")
    if run.generation is not None and run.config.policy.generation.vllm_cfg.enable_vllm_metrics_logger:
        run.logger.log_metrics(run.generation.engine_metrics(), step, prefix="generation_metrics")
    seconds = {name: sum(run.timer.elapsed(name)) for name in run.timer.get_timing_metrics("sum")}
    performance = throughput_metrics(
        rows.size,
        float(rows["total_lengths"].sum()),
        seconds,
        num_devices=run.device_count.total,
        train_devices=run.device_count.training,
        generation_devices=run.device_count.generation,
        generated_tokens=float(rows["generated_lengths"].sum()),
    )
    performance |= _utilisation(result, seconds)
    run.logger.log_metrics(performance, step, prefix="performance")
    run.logger.log_metrics(seconds, step, prefix="timing/train", step_finished=True)
    run.progress.step_done(step, reward=metrics["reward"], loss=metrics["loss"], tokens=float(rows["total_lengths"].sum()))


def _utilisation(result: TrainResult, seconds: dict[str, float]) -> dict[str, float]:
    if "total_flops" not in result or not seconds.get("policy_training"):
        return {}
    per_second = result["total_flops"] / seconds["policy_training"] / result["num_ranks"]
    metrics = {"train_flops_per_gpu": per_second}
    if "theoretical_tflops" in result:
        metrics["train_fp_utilization"] = per_second / 1e12 / (result["theoretical_tflops"] / result["num_ranks"])
    return metrics


def log_samples(run: GRPORun, experience: Experience[Any], step: int) -> None:
    """Writes `samples/train_data_stepN.jsonl`: every sample with its tokens, masks, rewards and log-probabilities."""
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
    if needs_previous_logprobs(run.config.grpo, run.config.loss_fn):
        columns["prev_logprobs"] = "prev_logprobs"
    run.store.apply(experience.handle, sample_log_stage(run.logger.samples_dir / f"train_data_step{step}.jsonl", columns))

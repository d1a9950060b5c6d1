"""Validation: generates responses to held-out prompts and reports accuracy.

Invariant: floor(max_val_samples / val_batch_size) batches run, at least one, each with the same seeds at every
validation.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from rich.console import Console

from nemo_rl.algorithms.grpo.collect import validation_plan
from nemo_rl.algorithms.grpo.run import GRPORun, ValidationParts
from nemo_rl.algorithms.grpo.step_reports import validation_metrics
from nemo_rl.config import GRPOConfig, MasterConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.call import environment_metrics
from nemo_rl.experience.environment_batcher import EnvironmentHandle
from nemo_rl.experience.rollout_source import RolloutSource
from nemo_rl.experience.rollouts import SampleOutcome, number_samples, rollout_metrics
from nemo_rl.experience.sample_log import sample_log_stage
from nemo_rl.experience.store import joined_rows
from nemo_rl.utils.logger import Logger, best_to_worst, print_message_log_samples
from nemo_rl.utils.record_events import Validated


def batch_size(grpo: GRPOConfig, prompts: int) -> int:
    """Prompts per validation batch, for a validation set of `prompts`."""
    return min(size for size in (grpo.val_batch_size, grpo.max_val_samples, prompts) if size is not None)


def batches_to_run(grpo: GRPOConfig, batches: int) -> int:
    """Number of batches per validation."""
    if grpo.max_val_samples is None:
        return batches
    return max(1, grpo.max_val_samples // (grpo.val_batch_size or grpo.max_val_samples))


# Of a validation's samples, in trackers.
_TABLE_ROWS = 16


@dataclass(frozen=True)
class _Validated:
    """All samples of a validation, and `messages` and `expected` of those that are shown."""

    rewards: torch.Tensor
    lengths: torch.Tensor
    truncated: torch.Tensor
    components: dict[str, torch.Tensor]
    tasks: list[str]
    shown: list[dict[str, Any]]
    samples: list[SampleOutcome]


def validate(run: GRPORun, step: int) -> dict[str, float]:
    """Validates and logs under step `step` (0: before training). Returns what `validation_metrics` gives, the mean of
    each `reward/<name>`, and `<environment>/<name>` that environments measure themselves. Raises ValueError: there is
    no validation data; EnvironmentFailure: an environment could not report its metrics.
    """
    cfg = run.config.grpo
    loader, parts = run.val_loader, run.validation
    if loader is None or parts is None:
        raise ValueError(
            "validation needs data.validation (or data.train.split_validation_size); set it, or switch "
            "val_period, val_at_start and val_at_end off"
        )
    run.progress.phase("validation")
    with run.timer.time("total_validation_time"):
        run.accelerators.serve(run.state.step)
        size = cfg.val_batch_size or cfg.max_val_samples or 1
        groups = batches_to_run(cfg, len(loader)) * size
        began = time.monotonic()
        with run.accelerators.demand(run.state.step, groups, 0, "validation"):
            batches = islice(loader, batches_to_run(cfg, len(loader)))
            done = _roll_out_all(run, parts.rollouts, list(batches), step)
        run.record.emit(Validated(run.state.step, len(done.rewards), time.monotonic() - began))
    metrics = validation_metrics(
        done.rewards,
        done.lengths,
        done.tasks,
        generations_per_prompt=cfg.val_num_generations_per_prompt,
        best_at_k=cfg.use_best_at_k,
    )
    metrics |= {name: float(values.mean()) for name, values in done.components.items()}
    metrics |= _measured_by_environments(parts, run.config, done)
    run.logger.log_metrics(metrics, step, prefix="validation")
    run.logger.log_metrics(
        {"total_validation_time": run.timer.reduce("total_validation_time", "sum")}, step, prefix="timing/validation"
    )
    graded = bool(((done.rewards != 0) & (done.rewards != 1)).any())
    run.progress.validated(metrics["accuracy"], name="reward" if graded else "accuracy", step=step)
    for line in parts.watch.observe(
        f"validation at step {step}",
        rollout_metrics(done.samples),
        max_new_tokens=run.config.policy.generation.max_new_tokens,
        max_turns=cfg.max_rollout_turns,
    ):
        run.progress.say(line)
    if done.shown:
        _show(run.logger, run.progress.console, done, step, run.config.logger.num_val_samples_to_print)
    run.state.val_metrics = metrics
    return metrics


def _show(logger: Logger, console: Console, done: _Validated, step: int, shown: int) -> None:
    """Shows `shown` samples, right and wrong ones, with turns and expected answers, in trackers and on the terminal."""
    rewards = done.rewards.tolist()[: len(done.shown)]
    logs, expected = ([sample[name] for sample in done.shown] for name in ("messages", "expected"))
    rows = best_to_worst(rewards, _TABLE_ROWS)
    table = {
        "sample": ["\n".join(f"{turn['role']}: {turn['content']}" for turn in logs[row]) for row in rows],
        "expected": ["" if expected[row] is None else str(expected[row]) for row in rows],
        "reward": [rewards[row] for row in rows],
        "task": [done.tasks[row] for row in rows],
    }
    logger.log_table(table, step, "validation/samples")
    print_message_log_samples(logs, rewards, shown, step, console, expected)


def _measured_by_environments(parts: ValidationParts, config: MasterConfig, done: _Validated) -> dict[str, float]:
    found: dict[str, float] = {}
    columns = {
        "rewards": done.rewards,
        "generated_lengths": done.lengths,
        "truncated": done.truncated,
        # Samples of a prompt are next to each other.
        "prompt_number": torch.arange(len(done.rewards)) // config.grpo.val_num_generations_per_prompt,
        **done.components,
    }
    for name, replicas in parts.environments.items():
        own = [row for row, task in enumerate(done.tasks) if parts.env_of_task.get(task) == name]
        if not own:
            continue
        batch = BatchedDataDict({key: values[own] for key, values in columns.items()})
        batch["task_name"] = [done.tasks[row] for row in own]
        timeout_s = EnvironmentHandle.of(name, replicas, config.env).timeout_s
        measured = environment_metrics(replicas[0], batch, timeout_s=timeout_s, name=name)
        found |= {f"{name}/{key}": value for key, value in measured.items()}
    return found


def _roll_out_all(run: GRPORun, source: RolloutSource, batches: Sequence[BatchedDataDict], step: int) -> _Validated:
    cfg = run.config.grpo
    rows: list[BatchedDataDict] = []
    tasks: list[str] = []
    shown: list[dict[str, object]] = []
    samples: list[SampleOutcome] = []
    for index, prompts in enumerate(batches):
        batch = number_samples(prompts, cfg.val_num_generations_per_prompt)
        rollout = source.roll_out(batch, validation_plan(run.config, index), 0)
        columns = rollout.columns
        rows.append(columns.rows)
        samples += rollout.samples
        tasks += batch["task_name"]
        handle = run.store.update(run.store.write(columns.tokens), {"rewards": columns.rows["total_reward"]})
        if run.config.logger.num_val_samples_to_print or (run.logger.backends and not shown):
            shown += [json.loads(text) for text in run.store.read(handle, ["conversation"])["conversation"]]
        path = run.logger.samples_dir / f"val_data_step{step}.jsonl"
        written = {"content": "content", "rewards": "rewards", "conversation": "conversation"}
        stage = sample_log_stage(path, written, append=index > 0)
        run.reports.put_samples(handle, stage)
    joined = joined_rows(rows)
    components = {name: joined[name] for name in joined if name.startswith("reward/")}
    lengths, truncated = joined["generated_lengths"], joined["truncated"]
    return _Validated(joined["total_reward"], lengths, truncated, components, tasks, shown, samples)

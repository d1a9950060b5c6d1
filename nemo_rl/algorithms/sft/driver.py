"""Supervised fine-tuning: what a run consists of, and its driver: one optimizer step per batch, validation loss,
checkpoints.

Decides only when things happen. A scheduler that lends accelerators brings a placement of its own. Invariants: a step
either completes (weights and counters agree) or raises with the weights of the step before; `state.step` is the number
of optimizer steps behind the policy's weights; nothing of training touches an accelerator but inside `building`, and
between `lend` and `step_done`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from nemo_rl.algorithms.grpo.metrics import aggregate_microbatch_metrics
from nemo_rl.algorithms.placement import OwnSlots, reserve_all
from nemo_rl.algorithms.profiling import profiled_steps
from nemo_rl.algorithms.run_checkpoint import RunState, begin_checkpoint, name_latest, saved_without_logs
from nemo_rl.config import SFTMasterConfig
from nemo_rl.data.loader import Batch
from nemo_rl.distributed.accelerators import Accelerator
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.loss.interfaces import LossFunction
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.checkpoint_retention import ranking_metric, should_save
from nemo_rl.utils.logger import Logger
from nemo_rl.utils.progress import RunProgress
from nemo_rl.utils.timer import TimeoutChecker, Timer

if TYPE_CHECKING:
    from torchdata.stateful_dataloader import StatefulDataLoader

logger = logging.getLogger(__name__)


class SFTState(RunState):
    """Counters of a run, under the names that SFT checkpoints use."""

    def training_info(self) -> dict[str, object]:
        """What a checkpoint carries."""
        return self.totals() | {"step": self.step_in_epoch, "epoch": self.epoch, **self.val_metrics}

    @classmethod
    def from_training_info(cls, info: dict[str, Any]) -> SFTState:
        """The counters of a checkpoint."""
        return cls.resumed(
            info,
            epoch=info["epoch"],
            step_in_epoch=info["step"],
            val_metrics={key: info[key] for key in ("val_loss",) if key in info},
        )


class Placement(Protocol):
    """Gives an SFT run its accelerators."""

    def connect(self, config: SFTMasterConfig) -> Accelerator:
        """Joins or starts the Ray cluster; its kind of accelerator."""
        ...

    def disconnect(self) -> None:
        """Leaves the Ray cluster. Safe to call twice."""
        ...

    def reserve(self, config: SFTMasterConfig, accelerator: Accelerator) -> RayVirtualCluster:
        """The run's slots."""
        ...

    def building(self) -> AbstractContextManager[object]:
        """The span in which the policy is built."""
        ...

    def lend(self, run: SFTRun) -> None:
        """Weights and optimizer are on the accelerators on return, for the next step or a validation."""
        ...

    def step_done(self, run: SFTRun) -> None:
        """A step is complete, with its validation and its checkpoint: the accelerators may go to somebody else."""
        ...


@dataclass
class SFTRun:
    """One run, set up and ready to be driven.

    Attributes:
        config: The merged configuration.
        policy: The trained policy.
        loss_fn: The loss.
        train_loader: Training conversations, batches of `policy.train_global_batch_size`.
        val_loader: Validation conversations, or None.
        logger: Metrics.
        checkpointer: Checkpoints.
        state: Counters.
        timer: Times of the current step.
        timeout: Watches `checkpointing.checkpoint_must_save_by`.
        progress: What a person watches.
        cluster: Slots, to be given back.
        placement: Who they come from.
    """

    config: SFTMasterConfig
    policy: Policy
    loss_fn: LossFunction
    train_loader: StatefulDataLoader[Batch]
    val_loader: StatefulDataLoader[Batch] | None
    logger: Logger
    checkpointer: CheckpointManager
    state: SFTState
    timer: Timer
    timeout: TimeoutChecker
    progress: RunProgress
    cluster: RayVirtualCluster
    placement: Placement


class OwnPlacement(OwnSlots):
    """One run on slots of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._ready = False

    def reserve(self, config: SFTMasterConfig, accelerator: Accelerator) -> RayVirtualCluster:
        """All slots of the configuration."""
        return reserve_all(config.cluster, accelerator, "policy")

    def building(self) -> AbstractContextManager[object]:
        """They are the run's from the start."""
        return nullcontext()

    def lend(self, run: SFTRun) -> None:
        """They stay the run's."""
        if not self._ready:
            run.policy.prepare_for_training()
            self._ready = True

    def step_done(self, run: SFTRun) -> None:
        """They stay the run's."""


def sft_train(run: SFTRun) -> None:
    """Drives a run to its end; `<checkpoint_dir>/latest` then names the weights of its last checkpoint.

    Raises:
        NonFiniteStepError, WorkerError, CheckpointError: The run cannot go on; the last checkpoint is usable.
    """
    run.timeout.start_iterations()
    run.placement.lend(run)
    if run.config.sft.val_at_start and run.state.step == 0:
        validate(run)
    timed_out = False
    last_step = partial(_save, run, {}, None)
    with profiled_steps(run.policy) as profiler, saved_without_logs(run.checkpointer, run.state, last_step):
        for batch in _batches(run):
            profiler.before(run.state.step + 1)
            run.timer.reset()
            with run.timer.time("total_step_time"):
                run.placement.lend(run)
                metrics = _step(run, batch)
                val_metrics = validate(run) if _validation_due(run) else None
                run.timeout.mark_iteration()
                timed_out = run.timeout.check_save()
                run.checkpointer.look()
                due = should_save(run.state.step, run.config.checkpointing, is_last=_finished(run), timeout=timed_out)
                if due or run.checkpointer.owes:
                    with run.timer.time("checkpointing"), run.checkpointer.trying():
                        _save(run, metrics, val_metrics)
            run.placement.step_done(run)
            _log_step(run, batch, metrics)
            if timed_out:
                break
    run.checkpointer.settle()
    if run.config.checkpointing.enabled:
        name_latest(run.checkpointer)
    cfg, step = run.config.sft, run.state.step
    if step < cfg.max_num_steps:
        why = (
            run.timeout.reason
            if timed_out
            else f"sft.max_num_epochs={cfg.max_num_epochs} passes over the data are done"
        )
        logger.warning("ended after step %d of sft.max_num_steps=%d: %s", step, cfg.max_num_steps, why)


def _batches(run: SFTRun) -> Iterator[BatchedDataDict]:
    """Training batches until steps or epochs are used up, the first one where the checkpoint left off."""
    while not _finished(run):
        for batch in run.train_loader:
            yield batch
            if _finished(run):
                return
        run.state.epoch += 1
        run.state.step_in_epoch = 0


def _finished(run: SFTRun) -> bool:
    cfg, state = run.config.sft, run.state
    last_epoch_done = state.epoch == cfg.max_num_epochs - 1 and state.step_in_epoch >= len(run.train_loader)
    return state.step >= cfg.max_num_steps or state.epoch >= cfg.max_num_epochs or last_epoch_done


def _step(run: SFTRun, batch: BatchedDataDict) -> dict[str, Any]:
    run.progress.phase("training")
    with run.timer.time("policy_training"):
        result = run.policy.train(batch, run.loss_fn, timer=run.timer)
    metrics: dict[str, Any] = aggregate_microbatch_metrics(result["all_mb_metrics"])
    metrics |= {"loss": float(result["loss"].mean()), "grad_norm": result["grad_norm"]}
    metrics |= {key: result[key] for key in ("lr", "wd") if key in result}
    run.state.step += 1
    run.state.step_in_epoch += 1
    run.state.consumed_samples += batch.size
    run.state.total_valid_tokens += int(metrics["global_valid_toks"])
    return metrics


def validate(run: SFTRun) -> dict[str, float]:
    """Mean loss per token of the first `sft.val_batches` validation batches, logged as `validation/val_loss`."""
    cfg = run.config.sft
    run.progress.phase("validation")
    total, tokens = 0.0, 0.0
    with run.timer.time("total_validation_time"):
        for index, batch in enumerate(run.val_loader or ()):
            if 0 < cfg.val_batches <= index:
                break
            whole = _filled(batch, cfg.val_global_batch_size)
            result = run.policy.train(
                whole, run.loss_fn, eval_mode=True, gbs=cfg.val_global_batch_size, mbs=cfg.val_micro_batch_size
            )
            valid = result["all_mb_metrics"]["global_valid_toks"][0]
            total += float(result["loss"].mean()) * valid
            tokens += valid
    run.state.val_metrics = {"val_loss": total / max(tokens, 1.0)}
    run.logger.log_metrics(run.state.val_metrics, run.state.step, prefix="validation")
    run.logger.log_metrics(
        {"total_validation_time": run.timer.reduce("total_validation_time", "sum")},
        run.state.step,
        prefix="timing/validation",
    )
    run.progress.validated(run.state.val_metrics["val_loss"], name="val_loss", step=run.state.step)
    return run.state.val_metrics


def _filled(batch: BatchedDataDict, rows: int) -> BatchedDataDict:
    """The batch with copies of its first row, masked out, until it has `rows` rows: the last batch is counted too, and
    divides over ranks.
    """
    missing = rows - batch.size
    if missing <= 0:
        return batch
    filler = batch.select_indices([0] * missing)
    filler["sample_mask"] = filler["sample_mask"] * 0
    return BatchedDataDict.from_batches([batch, filler])


def _validation_due(run: SFTRun) -> bool:
    cfg = run.config.sft
    return (cfg.val_at_end and _finished(run)) or (cfg.val_period > 0 and run.state.step % cfg.val_period == 0)


def _save(run: SFTRun, metrics: dict[str, object], val_metrics: dict[str, float] | None) -> None:
    info = run.state.training_info() | ranking_metric(
        run.config.checkpointing, run.state.step, train=metrics, val=val_metrics
    )
    begin_checkpoint(run.checkpointer, run.policy, run.train_loader, run.state.step, info, run.config)


def _log_step(run: SFTRun, batch: BatchedDataDict, metrics: dict[str, Any]) -> None:
    step, tokens = run.state.step, float(batch["input_lengths"].sum())
    run.logger.log_metrics(metrics, step, prefix="train")
    seconds = {name: sum(run.timer.elapsed(name)) for name in run.timer.get_timing_metrics("sum")}
    run.logger.log_metrics({"tokens_per_sec": tokens / seconds["total_step_time"]}, step, prefix="performance")
    run.logger.log_metrics(seconds, step, prefix="timing/train", step_finished=True)
    run.progress.step_done(step, loss=metrics["loss"], tokens=tokens)

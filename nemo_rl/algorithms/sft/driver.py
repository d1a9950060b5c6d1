"""Supervised fine-tuning: what a run consists of, and its steps: one optimizer step per batch, validation loss.

A scheduler that lends accelerators brings a placement of its own. Invariants: `state.step` is the number of optimizer
steps behind the policy's weights; nothing of training touches an accelerator but inside `building`, and between `lend`
and `step_done`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from nemo_rl.algorithms.grpo.metrics import aggregate_microbatch_metrics
from nemo_rl.algorithms.placement import OwnSlots, reserve_all
from nemo_rl.algorithms.run_checkpoint import RunState, name_latest
from nemo_rl.algorithms.training_loop import CompletedStep, Steps, TrainingRun, train_to_end
from nemo_rl.config import SFTMasterConfig
from nemo_rl.data.loader import Batch
from nemo_rl.distributed.accelerators import Accelerator
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster

if TYPE_CHECKING:
    from torchdata.stateful_dataloader import StatefulDataLoader

    from nemo_rl.data.loader import HasState


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
class SFTRun(TrainingRun[SFTMasterConfig]):
    """An SFT run.

    Attributes:
        train_loader: Training conversations, batches of `policy.train_global_batch_size`.
        cluster: Slots, to be given back.
        placement: Who they come from.
    """

    train_loader: StatefulDataLoader[Batch]
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
    train_to_end(SFTSteps(run))
    if run.config.checkpointing.enabled:
        name_latest(run.checkpointer)


class SFTSteps(Steps[SFTRun]):
    """What SFT does in the loop."""

    section = "sft"

    def __init__(self, run: SFTRun) -> None:
        self.run = run
        self._batches = _batches(run)
        self._tokens = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Nothing runs beside the steps."""
        self.run.placement.lend(self.run)
        if self.run.config.sft.val_at_start and self.run.state.step == 0:
            validate(self.run)
        yield

    def finished(self) -> bool:
        """Whether steps or epochs are used up."""
        return _finished(self.run)

    def train(self) -> dict[str, Any] | None:
        """One optimizer step on the next batch."""
        run, batch = self.run, next(self._batches, None)
        if batch is None:
            return None
        run.placement.lend(run)
        self._tokens = float(batch["input_lengths"].sum())
        return _step(run, batch)

    def validate(self) -> dict[str, float]:
        """See `validate`."""
        return validate(self.run)

    def position(self) -> tuple[HasState, Mapping[str, object]]:
        """The loader is all there is."""
        return self.run.train_loader, {}

    def report(self, done: CompletedStep) -> None:
        """The accelerators may go to somebody else; logs metrics, times and rates."""
        run, step = self.run, self.run.state.step
        run.placement.step_done(run)
        run.logger.log_metrics(done.metrics, step, prefix="train")
        seconds = {name: sum(run.timer.elapsed(name)) for name in run.timer.get_timing_metrics("sum")}
        rate = {"tokens_per_sec": self._tokens / seconds["total_step_time"]}
        run.logger.log_metrics(rate, step, prefix="performance")
        run.logger.log_metrics(seconds, step, prefix="timing/train", step_finished=True)
        run.progress.step_done(step, loss=done.metrics["loss"], tokens=self._tokens)


def _batches(run: SFTRun) -> Iterator[BatchedDataDict]:
    """Training batches of one epoch after the other, the first one where the checkpoint left off."""
    while True:
        yield from run.train_loader
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

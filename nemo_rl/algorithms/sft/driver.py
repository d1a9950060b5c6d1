"""Supervised fine-tuning: one optimizer step per batch, with validation loss.

A scheduler that lends accelerators supplies its own placement. Invariants: `state.step` is the number of optimizer
steps behind the policy's weights; training uses accelerators only inside `building` and between `lend_training` and
`yield_training`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_rl.algorithms.grpo.step_reports import aggregate_microbatch_metrics
from nemo_rl.algorithms.placement import Clusters
from nemo_rl.algorithms.resume import RunState, name_latest
from nemo_rl.algorithms.training_loop import CompletedStep, Steps, TrainingRun, train_to_end
from nemo_rl.config import SFTMasterConfig
from nemo_rl.data.loader import Batch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

if TYPE_CHECKING:
    from torchdata.stateful_dataloader import StatefulDataLoader

    from nemo_rl.data.loader import HasState
    from nemo_rl.utils.checkpoint import TrainingInfo
    from nemo_rl.utils.log_backends import Metrics


class SFTState(RunState):
    """Counters of a run, under the names that SFT checkpoints use."""

    def training_info(self) -> dict[str, object]:
        """The fields of a checkpoint's `training_info.json`."""
        return self.totals() | {"step": self.step_in_epoch, "epoch": self.epoch, **self.val_metrics}

    @classmethod
    def from_training_info(cls, info: TrainingInfo) -> SFTState:
        """Counters from a checkpoint."""
        return cls.resumed(
            info,
            epoch=info["epoch"],
            step_in_epoch=info["step"],
            val_metrics={key: info[key] for key in ("val_loss",) if key in info},
        )


@dataclass(kw_only=True)
class SFTRun(TrainingRun[SFTMasterConfig]):
    """An SFT run."""

    train_loader: StatefulDataLoader[Batch]  # training conversations, batches of `policy.train_global_batch_size`
    clusters: Clusters


def sft_train(run: SFTRun) -> None:
    """Trains to the end, then points `<checkpoint_dir>/latest` at the newest weights. Raises NonFiniteStepError,
    WorkerError, CheckpointError: the run cannot go on; the last checkpoint is usable.
    """
    train_to_end(SFTSteps(run))
    if run.config.checkpointing.enabled:
        name_latest(run.checkpointer)


class SFTSteps(Steps[SFTRun]):
    """Steps of SFT."""

    section = "sft"

    def __init__(self, run: SFTRun) -> None:
        self.run = run
        self._batches = _batches(run)
        self._batch: BatchedDataDict | None = None

    @contextmanager
    def running(self) -> Generator[None]:
        """Validates first if configured; SFT generates nothing."""
        self.run.accelerators.lend_training(self.run.state.step)
        self.run.policy.prepare_for_training()
        if self.run.config.sft.val_at_start and self.run.state.step == 0:
            validate(self.run)
        yield

    def finished(self) -> bool:
        """Whether steps or epochs are used up."""
        return _finished(self.run)

    @contextmanager
    def open(self) -> Generator[None]:
        """Loads the step's batch."""
        self._batch = next(self._batches, None)
        yield

    def train(self) -> Metrics | None:
        """Trains on the batch."""
        if self._batch is None:
            return None
        self.run.accelerators.lend_training(self.run.state.step)
        return _step(self.run, self._batch)

    def validate(self) -> dict[str, float]:
        return validate(self.run)

    def position(self) -> tuple[HasState, Mapping[str, object]]:
        """The loader; no further files."""
        return self.run.train_loader, {}

    def report(self, done: CompletedStep) -> None:
        """Releases lent accelerators; logs metrics, times and rates."""
        run, step = self.run, self.run.state.step
        tokens = float(self._batch["input_lengths"].sum()) if self._batch is not None else 0.0
        run.accelerators.yield_training(step)
        run.logger.log_metrics(done.metrics, step, prefix="train")
        seconds = {name: sum(run.timer.elapsed(name)) for name in run.timer.get_timing_metrics("sum")}
        rate = {"tokens_per_sec": tokens / seconds["total_step_time"]}
        run.logger.log_metrics(rate, step, prefix="performance")
        run.logger.log_metrics(seconds, step, prefix="timing/train", step_finished=True)
        run.progress.step_done(step, loss=done.metrics["loss"], tokens=tokens)


def _batches(run: SFTRun) -> Iterator[BatchedDataDict]:
    """Yields training batches, epoch after epoch, from the restored loader position."""
    while not _finished(run):
        yield from run.train_loader
        run.state.epoch += 1
        run.state.step_in_epoch = 0


def _finished(run: SFTRun) -> bool:
    cfg, state = run.config.sft, run.state
    last_epoch_done = state.epoch == cfg.max_num_epochs - 1 and state.step_in_epoch >= len(run.train_loader)
    return state.step >= cfg.max_num_steps or state.epoch >= cfg.max_num_epochs or last_epoch_done


def _step(run: SFTRun, batch: BatchedDataDict) -> Metrics:
    run.progress.phase("training")
    with run.timer.time("policy_training"):
        result = run.policy.train(batch, run.loss_fn, timer=run.timer)
    metrics: Metrics = aggregate_microbatch_metrics(result["all_mb_metrics"])
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
    """Pads the batch to `rows` rows with masked copies of its first row, so that the last batch divides over ranks."""
    missing = rows - batch.size
    if missing <= 0:
        return batch
    filler = batch.select_indices([0] * missing)
    filler["sample_mask"] = filler["sample_mask"] * 0
    return BatchedDataDict.from_batches([batch, filler])

"""What a policy is to those who use it, one small protocol per consumer: scoring stages, training loops, whoever lends
accelerators, sync sessions, and whoever saves.

Batches are handles: a `BatchedDataDict` in process, a reference to stored columns on the data plane; a policy takes the
kind its store writes. Knows no backend. Log-probability convention: [B, S], position i holds log p(token i | tokens <
i), position 0 is 0, padding is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypedDict, TypeVar

import torch

from nemo_rl.data_plane.meta import KVBatchMeta
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.loss.interfaces import LossFunction
from nemo_rl.weight_sync.session import WeightSource

if TYPE_CHECKING:
    from nemo_rl.utils.timer import Timer

BatchHandle = BatchedDataDict | KVBatchMeta
"""Rows of a batch: they themselves, or a reference to where they are stored."""


@dataclass(frozen=True)
class StoredColumns:
    """Results that stayed with their rows: name in the result to name of the column."""

    columns: Mapping[str, str]


Scores = BatchedDataDict | StoredColumns
"""What scoring gives: columns, or where they were stored."""

Result_co = TypeVar("Result_co", covariant=True)


class TrainResult(TypedDict, total=False):
    """What `train` returns.

    Attributes:
        loss: float32 tensor, one entry per optimizer step.
        grad_norm: Norm of the last optimizer step, before clipping.
        all_mb_metrics: Per metric the values of all microbatches of all ranks, divided by global counts.
        total_flops: Floating-point operations of the step over all ranks.
        num_ranks: Ranks that took part.
        theoretical_tflops: Peak of all ranks together; absent where unknown.
        lr: Learning rate used.
        wd: Weight decay used.
        skipped_steps: Steps without a trained token, which left weights, optimizer and schedule as they were.
    """

    loss: torch.Tensor
    grad_norm: float
    all_mb_metrics: dict[str, list[float]]
    total_flops: float
    num_ranks: int
    theoretical_tflops: float
    lr: float
    wd: float
    skipped_steps: int


class Pending(Protocol[Result_co]):
    """A call under way on the workers. Calls of one policy run in the order in which they were submitted."""

    def done(self) -> bool:
        """Whether every worker has answered, with or without an error."""
        ...

    def result(self, timeout_s: float | None = None) -> Result_co:
        """Waits for the answer.

        Raises:
            WorkerError: A worker failed.
            WorkerTimeoutError: No answer within `timeout_s`.
        """
        ...


class ScoringPolicy(Protocol):
    """Log-probabilities, for the stages of a step."""

    def get_logprobs(self, data: BatchHandle, timer: Timer | None = None) -> Scores:
        """`logprobs [B, S]` of the batch's own tokens under the current weights, after the sampling filters."""
        ...

    def get_reference_policy_logprobs(
        self, data: BatchHandle, micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> Scores:
        """`reference_logprobs [B, S]` under the initial weights, without sampling filters."""
        ...

    def get_policy_and_reference_logprobs(self, data: BatchHandle, timer: Timer | None = None) -> Scores:
        """`logprobs` and `reference_logprobs` of one batch with one call of the workers; the numbers are those of the
        two calls.
        """
        ...

    def get_topk_logits(
        self, data: BatchHandle, k: int, micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> BatchedDataDict:
        """`topk_logits [B, S, k]` and `topk_indices [B, S, k]` of the next-token distribution at each position."""
        ...


class TrainingPolicy(Protocol):
    """Optimizer steps, whole or in parts."""

    def train(
        self,
        data: BatchHandle,
        loss_fn: LossFunction,
        eval_mode: bool = False,
        *,
        gbs: int | None = None,
        mbs: int | None = None,
        timer: Timer | None = None,
    ) -> TrainResult:
        """One optimizer step per `gbs` samples; with `eval_mode` only the losses."""
        ...

    def submit_train(
        self,
        data: BatchHandle,
        loss_fn: LossFunction,
        eval_mode: bool = False,
        *,
        gbs: int | None = None,
        mbs: int | None = None,
        timer: Timer | None = None,
    ) -> Pending[TrainResult]:
        """`train` without waiting for it."""
        ...

    def begin_train_step(self, loss_fn: LossFunction, gbs: int | None = None, mbs: int | None = None) -> None:
        """Opens a step; one may be open at a time."""
        ...

    def train_microbatches(self, data: BatchHandle, timer: Timer | None = None) -> None:
        """Adds a chunk of any number of samples to the open step, and waits for it."""
        ...

    def submit_microbatches(self, data: BatchHandle, timer: Timer | None = None) -> Pending[None]:
        """Adds a chunk to the open step without waiting for it."""
        ...

    def finish_train_step(self) -> TrainResult:
        """Steps the optimizer once for everything since `begin_train_step`, and waits for it."""
        ...

    def submit_finish_train_step(self) -> Pending[TrainResult]:
        """`finish_train_step` without waiting for it."""
        ...

    def abort_train_step(self) -> None:
        """Closes an open step and leaves weights and optimizer as they were; nothing to do when none is open."""
        ...


class ResidentPolicy(Protocol):
    """Where training state lies, for whoever lends accelerators."""

    def prepare_for_training(self) -> None:
        """Makes everything resident that training needs."""
        ...

    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        """Makes everything resident that log-probability passes need."""
        ...

    def finish_training(self) -> None:
        """Ends a phase of training."""
        ...

    def offload_before_refit(self) -> None:
        """Optimizer to the host: weights are still needed on the device for the export."""
        ...

    def offload_after_refit(self) -> None:
        """Model and optimizer to the host."""
        ...

    def offload_training_gpu(self) -> None:
        """Everything of training off the devices but communicators."""
        ...

    def destroy_nccl_groups(self) -> None:
        """Gives the device memory of communicators back; they are made again before their next use."""
        ...

    def get_free_memory_bytes(self) -> int:
        """Free device memory of the fullest slot, in bytes."""
        ...


class RefitSource(WeightSource, Protocol):
    """The weights of a policy, for sync sessions."""

    def prepare_refit_info(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Name to (shape, dtype name) of everything that a refit sends."""
        ...


class SavedPolicy(Protocol):
    """Checkpoints."""

    def save_checkpoint(
        self,
        weights_path: str,
        optimizer_path: str | None = None,
        tokenizer_path: str | None = None,
        save_format: str = "safetensors",
    ) -> None:
        """Snapshots weights (a Hugging Face directory), optimizer and tokenizer; files are written in the
        background.
        """
        ...

    def finalize_async_save(self) -> None:
        """Waits until the last snapshot is on disk."""
        ...


class PolicyInterface(ScoringPolicy, TrainingPolicy, ResidentPolicy, RefitSource, SavedPolicy, Protocol):
    """All of it: what a run owns."""

    def wait_until_started(self) -> None:
        """Waits until every worker has loaded its model."""
        ...

    def shutdown(self) -> bool:
        """Ends the workers. Safe to call twice."""
        ...

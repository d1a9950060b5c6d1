"""The policy's interface: batch handles, scores and training results.

A batch is a `BatchedDataDict` in process, or a reference to stored columns on the data plane. Log-probabilities are [B,
S]: position i holds log p(token i | tokens < i); position 0 and padding are 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypedDict

import torch

from nemo_rl.data_plane.meta import KVBatchMeta
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.loss.interfaces import LossFunction

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


class TrainResult(TypedDict, total=False):
    """Result of `train`. `all_mb_metrics`: per metric the values of all microbatches of all ranks, divided by global
    counts.
    """

    loss: torch.Tensor  # float32 tensor, one entry per optimizer step
    grad_norm: float  # norm of the last optimizer step, before clipping
    all_mb_metrics: dict[str, list[float]]
    total_flops: float  # floating-point operations of the step over all ranks
    num_ranks: int
    theoretical_tflops: float  # peak of all ranks together; absent where unknown
    lr: float
    wd: float
    skipped_steps: int  # steps without a trained token, which left weights, optimizer and schedule as they were


class PolicyInterface(Protocol):
    """The methods of a policy that NeMo-RL names or a run calls; `Policy` documents them."""

    def wait_until_started(self) -> None: ...

    def get_logprobs(self, data: BatchHandle, timer: Timer | None = None) -> Scores: ...

    def get_reference_policy_logprobs(
        self, data: BatchHandle, micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> Scores: ...

    def get_policy_and_reference_logprobs(self, data: BatchHandle, timer: Timer | None = None) -> Scores: ...

    def get_naturally_routed_logprobs(self, data: BatchHandle, timer: Timer | None = None) -> Scores: ...

    def get_topk_logits(
        self, data: BatchHandle, k: int, micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> Scores: ...

    def train(
        self,
        data: BatchHandle,
        loss_fn: LossFunction,
        eval_mode: bool = False,
        *,
        gbs: int | None = None,
        mbs: int | None = None,
        timer: Timer | None = None,
    ) -> TrainResult: ...

    def begin_train_step(self, loss_fn: LossFunction, gbs: int | None = None, mbs: int | None = None) -> None: ...

    def train_microbatches(self, data: BatchHandle, timer: Timer | None = None) -> None: ...

    def finish_train_step(self) -> TrainResult: ...

    def abort_train_step(self) -> None: ...

    def prepare_for_training(self) -> None: ...

    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None: ...

    def finish_training(self) -> None: ...

    def save_checkpoint(
        self,
        weights_path: str,
        optimizer_path: str | None = None,
        tokenizer_path: str | None = None,
        save_format: str = "safetensors",
    ) -> None: ...

    def shutdown(self) -> bool: ...

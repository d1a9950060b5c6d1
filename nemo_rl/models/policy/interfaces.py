"""What a policy is to drivers: log-probabilities, training steps, checkpoints, and a source of weights.

Batches are handles: a `BatchedDataDict` in process, a reference to stored columns on the data plane; a policy takes the
kind its store writes. Knows no backend. Log-probability convention: [B, S], position i holds log p(token i | tokens < i),
position 0 is 0, padding is 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, TypedDict

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.loss.interfaces import LossFunction

if TYPE_CHECKING:
    from nemo_rl.utils.timer import Timer


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
    """

    loss: Any
    grad_norm: float
    all_mb_metrics: dict[str, list[float]]
    total_flops: float
    num_ranks: int
    theoretical_tflops: float
    lr: float
    wd: float


class PolicyInterface(ABC):
    """A trainable policy."""

    @abstractmethod
    def get_logprobs(self, data: BatchedDataDict[Any], timer: Timer | None = None) -> BatchedDataDict[Any]:
        """`logprobs [B, S]` of the batch's own tokens under the current weights, after the sampling filters."""

    @abstractmethod
    def get_reference_policy_logprobs(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> BatchedDataDict[Any]:
        """`reference_logprobs [B, S]` under the initial weights, without sampling filters."""

    @abstractmethod
    def get_topk_logits(self, data: BatchedDataDict[Any], k: int, micro_batch_size: int | None = None, timer: Timer | None = None) -> BatchedDataDict[Any]:
        """`topk_logits [B, S, k]` and `topk_indices [B, S, k]` of the next-token distribution at each position."""

    @abstractmethod
    def train(
        self,
        data: BatchedDataDict[Any],
        loss_fn: LossFunction,
        eval_mode: bool = False,
        *,
        gbs: int | None = None,
        mbs: int | None = None,
        timer: Timer | None = None,
    ) -> TrainResult:
        """One optimizer step per `gbs` samples; with `eval_mode` only the losses."""

    @abstractmethod
    def prepare_for_training(self) -> None:
        """Makes everything resident that training needs."""

    @abstractmethod
    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        """Makes everything resident that log-probability passes need."""

    @abstractmethod
    def finish_training(self) -> None:
        """Ends a phase of training."""

    @abstractmethod
    def save_checkpoint(
        self, weights_path: str, optimizer_path: str | None = None, tokenizer_path: str | None = None, save_format: str = "safetensors"
    ) -> None:
        """Snapshots weights (a Hugging Face directory), optimizer and tokenizer; files are written in the background."""

    @abstractmethod
    def finalize_async_save(self) -> None:
        """Waits until the last snapshot is on disk."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Ends the workers. Safe to call twice."""

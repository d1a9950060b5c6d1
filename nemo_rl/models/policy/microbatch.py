"""What happens at both ends of a model's forward pass, whichever framework runs it: columns in, loss or scores out.

A backend packs a microbatch into one row, runs it, and hands the row's scores to these functions. Knows losses and
packed rows, no framework. Invariant: every backend computes loss, metrics and log-probabilities from scores in the same
way.

Shapes: B rows, S padded width, T tokens of the packed row, V vocabulary, k largest logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from nemo_rl.distributed.devices import to_device
from nemo_rl.loss.interfaces import LossFunction, LossInputType
from nemo_rl.models.policy.packed import PackedBatch
from nemo_rl.models.policy.scoring import LogitTransform, TokenScores
from nemo_rl.models.policy.train_step import MicrobatchResult, non_finite_rows

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def idle_microbatch() -> dict[str, torch.Tensor]:
    """A row of two tokens, for ranks that take part in collectives without work of their own."""
    return {"input_ids": torch.zeros((1, 2), dtype=torch.long), "input_lengths": torch.tensor([2])}


def wants_logits(loss_fn: LossFunction) -> bool:
    """Whether the loss reads whole logits instead of log-probabilities."""
    return loss_fn.input_type is LossInputType.LOGIT


def microbatch_loss(
    data: Mapping[str, torch.Tensor],
    loss_fn: LossFunction,
    batch: PackedBatch,
    output: TokenScores | torch.Tensor,
    *,
    filters: bool,
    device: torch.device,
) -> tuple[torch.Tensor, MicrobatchResult]:
    """The plain-sum loss of one microbatch, with gradient, and what it leaves behind.

    Args:
        data: The microbatch's columns.
        loss_fn: Called with both counts 1.
        batch: How the microbatch was packed.
        output: Scores of the row, or its logits [T, V] where the loss wants those.
        filters: Whether the scores before and after generation's filters differ.
        device: Where the scores are.
    """
    on_device = {
        key: to_device(value, device) if isinstance(value, torch.Tensor) else value for key, value in data.items()
    }
    if isinstance(output, torch.Tensor):
        logits_BSV = batch.unpack(output)
        bad_rows_B = non_finite_rows(logits_BSV, on_device)
        loss, metrics = loss_fn(on_device, 1.0, 1.0, logits=logits_BSV)
    else:
        logprobs_BT = batch.unpack(output.logprobs_T)[:, :-1]
        unfiltered_BT = batch.unpack(output.unfiltered_T)[:, :-1] if filters else None
        bad_rows_B = non_finite_rows(logprobs_BT, on_device)
        loss, metrics = loss_fn(
            on_device, 1.0, 1.0, next_token_logprobs=logprobs_BT, next_token_logprobs_unfiltered=unfiltered_BT
        )
    return loss, MicrobatchResult(
        {name: torch.as_tensor(value).detach() for name, value in metrics.items()}, bad_rows_B
    )


def logprob_rows(data: Mapping[str, torch.Tensor], batch: PackedBatch, scores: TokenScores) -> torch.Tensor:
    """[B, S] log-probabilities on the host: of each token given those before it, position 0 and padding 0."""
    next_BS = batch.unpack(scores.logprobs_T).float()
    logprobs_BS = torch.cat([torch.zeros_like(next_BS[:, :1]), next_BS[:, :-1]], dim=1).cpu()
    # A sequence's last token predicts nothing of the sequence; its score would land on the first padding token.
    padding_BS = torch.arange(logprobs_BS.shape[1]) >= data["input_lengths"].cpu()[:, None]
    return logprobs_BS.masked_fill(padding_BS, 0.0)


def largest_logits(batch: PackedBatch, logits_TV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and token ids [B, S, k] of the k largest logits after each position, on the host."""
    values_Tk, indices_Tk = logits_TV.topk(k, dim=-1)
    return batch.unpack(values_Tk).cpu(), batch.unpack(indices_Tk).cpu()


def logit_transform(
    temperature: float | None, top_p: float, top_k: int | None, model: PretrainedConfig
) -> LogitTransform:
    """What generation does to logits, and what the model itself does before.

    Args:
        temperature: Of generation; None or 0 is 1.
        top_p: Of generation.
        top_k: Of generation.
        model: The model's Hugging Face configuration.
    """
    scaling = getattr(model, "logits_scaling", None)
    return LogitTransform(
        temperature or 1.0,
        top_p,
        top_k,
        getattr(model, "final_logit_softcapping", None),
        getattr(model, "logit_scale", None) or (1.0 / scaling if scaling else 1.0),
    )

"""The DTensor backend of a training step: forward, backward, gradient norm and optimizer step under FSDP2.

Knows the sharded model and the mesh; counts and normalisation belong to the step itself. Invariant: accumulated
gradients are sums over all data-parallel ranks, once each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl.distributed.devices import release_cached_memory
from nemo_rl.loss.interfaces import LossFunction, LossInputType
from nemo_rl.models.dtensor.mesh import ParallelMesh
from nemo_rl.models.dtensor.parallelize import HEADWISE_NORMS, is_tensor_parallel, local_tensor
from nemo_rl.models.dtensor.scorer import CausalLMScorer
from nemo_rl.models.dtensor.scoring import LogitTransform, TokenScores
from nemo_rl.models.policy.packed import pack
from nemo_rl.models.policy.train_step import MicrobatchResult, non_finite_rows


class DTensorBackend:
    """Runs microbatches of one rank.

    Args:
        scorer: The sharded model.
        mesh: This rank's groups.
        transform: Temperature and filters of generation.
        optimizer: None for a policy that only scores.
        defer_gradient_sync: Whether gradients are reduced once per step; until then every rank holds them whole.
        clear_cache_every: Microbatches between two times that cached device memory is given back; None never.
    """

    def __init__(
        self,
        scorer: CausalLMScorer,
        mesh: ParallelMesh,
        transform: LogitTransform,
        optimizer: torch.optim.Optimizer | None,
        *,
        defer_gradient_sync: bool = False,
        clear_cache_every: int | None = None,
    ) -> None:
        self.scorer = scorer
        self.mesh = mesh
        self.transform = transform
        self.optimizer = optimizer
        self.device = mesh.device
        self._last: dict[str, Any] | None = None
        self._defers = defer_gradient_sync
        self._clear_every = clear_cache_every
        self._microbatches = 0

    def start_step(self) -> None:
        """Training mode, zero gradients."""
        self.scorer.train()
        self.discard_gradients()
        self.scorer.synchronize_gradients(not self._defers)

    def evaluate(self, data: Mapping[str, Any], loss_fn: LossFunction) -> MicrobatchResult:
        """Loss and metrics of one microbatch without a backward pass."""
        return self._loss(data, loss_fn)[1]

    def forward_backward(self, data: Mapping[str, Any], loss_fn: LossFunction) -> MicrobatchResult:
        """Adds the gradient of the plain-sum loss of one microbatch."""
        loss, result = self._loss(data, loss_fn)
        loss.backward()
        self._last = {key: data[key][:1] for key in ("input_ids", "input_lengths")}
        self._microbatches += 1
        if self._clear_every is not None and self._microbatches % self._clear_every == 0:
            release_cached_memory(self.device)
        return result

    def _loss(self, data: Mapping[str, Any], loss_fn: LossFunction) -> tuple[torch.Tensor, MicrobatchResult]:
        wants_logits = loss_fn.input_type is LossInputType.LOGIT
        batch = pack(data, self.device, multiple=self.scorer.row_multiple(), trained_only=not wants_logits)
        on_device = {key: value.to(self.device, non_blocking=True) if isinstance(value, torch.Tensor) else value for key, value in data.items()}
        if wants_logits:
            logits_BSV = batch.unpack(self.scorer(batch, self.transform, logits=True))
            bad_rows_B = non_finite_rows(logits_BSV, on_device)
            loss, metrics = loss_fn(on_device, 1.0, 1.0, logits=logits_BSV)
        else:
            scores: TokenScores = self.scorer(batch, self.transform)
            logprobs_BT = batch.unpack(scores.logprobs_T)[:, :-1]
            unfiltered_BT = batch.unpack(scores.unfiltered_T)[:, :-1] if self.transform.filters else None
            bad_rows_B = non_finite_rows(logprobs_BT, on_device)
            loss, metrics = loss_fn(on_device, 1.0, 1.0, next_token_logprobs=logprobs_BT, next_token_logprobs_unfiltered=unfiltered_BT)
        return loss, MicrobatchResult({name: torch.as_tensor(value).detach() for name, value in metrics.items()}, bad_rows_B)

    def idle_backward(self) -> None:
        """Forward and backward on one short row whose gradient is zero."""
        data = self._last or {"input_ids": torch.zeros((1, 2), dtype=torch.long), "input_lengths": torch.tensor([2])}
        scores: TokenScores = self.scorer(pack(data, self.device, multiple=self.scorer.row_multiple()), self.transform)
        (scores.unfiltered_T.sum() * 0.0).backward()

    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over data-parallel ranks."""
        return self.mesh.sum_over_data(values)

    def max_over_data(self, value: int) -> int:
        """Maximum over data-parallel ranks."""
        tensor = torch.tensor([value], device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.mesh.data_mesh.get_group())
        return int(tensor)

    def gather_over_data(self, numbers: list[int]) -> list[int]:
        """The numbers of all data-parallel ranks, in rank order."""
        group = self.mesh.data_mesh.get_group()
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, numbers, group=group)
        return [number for part in parts for number in part]

    def gradient_norm(self) -> torch.Tensor:
        """Global L2 norm: squares of shards summed over the axes that cut them, each element once."""
        if self._defers:
            # Which microbatch is a step's last is known only now: an empty one carries the sums of all.
            self.scorer.synchronize_gradients(True)
            self.idle_backward()
        self._sum_headwise_norms()
        cut = torch.zeros((), dtype=torch.float64, device=self.device)
        whole = torch.zeros((), dtype=torch.float64, device=self.device)
        for parameter in self.scorer.parameters():
            if parameter.grad is None:
                continue
            square = torch.linalg.vector_norm(local_tensor(parameter.grad), dtype=torch.float32).double().square().to(self.device)
            if is_tensor_parallel(parameter):
                cut += square
            else:
                whole += square
        if self.mesh.tp_group is not None:
            dist.all_reduce(cut, group=self.mesh.tp_group)
        total = cut + whole
        dist.all_reduce(total, group=self.mesh.shard_mesh.get_group())
        return total.sqrt()

    def _sum_headwise_norms(self) -> None:
        group = self.mesh.tp_group
        if group is None:
            return
        for name, parameter in self.scorer.named_parameters():
            if parameter.grad is not None and any(norm in name for norm in HEADWISE_NORMS):
                dist.all_reduce(local_tensor(parameter.grad), group=group)

    @torch.no_grad()
    def apply_gradients(self, factor: float) -> None:
        """Multiplies gradients by `factor`, steps the optimizer and drops the gradients."""
        if self.optimizer is None:
            raise RuntimeError("this policy was built without an optimizer (init_optimizer=False) and cannot train")
        gradients = [local_tensor(p.grad) for p in self.scorer.parameters() if p.grad is not None]
        torch._foreach_mul_(gradients, factor)
        self.optimizer.step()
        self.discard_gradients()

    def discard_gradients(self) -> None:
        """Drops accumulated gradients, and whatever a pass that failed left gathered."""
        self.scorer.reshard()
        self.scorer.drop_deferred_gradients()
        for parameter in self.scorer.parameters():
            parameter.grad = None

    @torch.no_grad()
    def logprobs(self, data: Mapping[str, Any], *, filtered: bool) -> torch.Tensor:
        """[B, S] log-probabilities on the host, position 0 and padding 0."""
        self.scorer.eval()
        batch = pack(data, self.device, multiple=self.scorer.row_multiple())
        transform = self.transform if filtered else LogitTransform(self.transform.temperature, softcap=self.transform.softcap, scale=self.transform.scale)
        scores: TokenScores = self.scorer(batch, transform)
        next_BS = batch.unpack(scores.logprobs_T).float()
        logprobs_BS = torch.cat([torch.zeros_like(next_BS[:, :1]), next_BS[:, :-1]], dim=1).cpu()
        # A sequence's last token predicts nothing of the sequence; its score would land on the first padding token.
        padding_BS = torch.arange(logprobs_BS.shape[1]) >= data["input_lengths"].cpu()[:, None]
        return logprobs_BS.masked_fill(padding_BS, 0.0)

    @torch.no_grad()
    def topk_logits(self, data: Mapping[str, Any], k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and token ids [B, S, k] of the k largest logits after each position, on the host."""
        self.scorer.eval()
        batch = pack(data, self.device, multiple=self.scorer.row_multiple())
        values_Tk, indices_Tk = self.scorer(batch, LogitTransform(), logits=True).topk(k, dim=-1)
        return batch.unpack(values_Tk).cpu(), batch.unpack(indices_Tk).cpu()

"""A causal language model together with the scoring of its tokens, as one module.

FSDP2 gathers the output projection around a module's forward, so scoring must be inside it. Takes packed rows, on this
rank's slice with context parallelism. Invariant: every rank of a replica returns the scores of the whole row, and
gradients flow into this rank's slice only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from typing_extensions import override

from nemo_rl.models.dtensor.dtensor_checks import carries_state, check_one_sequence
from nemo_rl.models.dtensor.dtensor_lora import AdaptedLinear
from nemo_rl.models.dtensor.parallelize import ParallelMesh, local_tensor
from nemo_rl.models.policy.packed import PackedBatch, Projection, RowOutput, RowSlice, score_row
from nemo_rl.models.policy.router_replay import RouterPass, RouterReplay
from nemo_rl.models.policy.scoring import LogitTransform

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam


class CausalLMScorer(nn.Module):
    """Wraps a Hugging Face causal language model, which may be sharded by tensor parallelism.

    Args:
        chunk: Tokens whose logits exist at a time; None chooses.
        head_dtype: Precision of the output projection; None takes the model's.
        replay: The model's routers, if recorded routes are replayed.
    """

    def __init__(
        self,
        model: Any,
        mesh: ParallelMesh,
        chunk: int | None,
        *,
        head_dtype: torch.dtype | None = None,
        replay: RouterReplay | None = None,
    ) -> None:
        super().__init__()
        self.lm = model
        self._mesh = mesh
        self._cut = RowSlice(mesh.cp_group, mesh.cp_rank, mesh.sizes.cp)
        self._chunk = chunk
        self._head_dtype = head_dtype
        self._one_each = carries_state(model.config)
        self.replay = replay

    @override
    def train(self, mode: bool = True) -> Self:
        """Sets the training mode, which reaches adapters alone: dropout and router noise of the model's own files would
        make each pass score a token otherwise.
        """
        super().train(False)
        for module in self.modules():
            module.training = mode and (module is self or isinstance(module, AdaptedLinear))
        return self

    def row_multiple(self) -> int:
        """A row's length must be a multiple of this."""
        return self._mesh.sizes.tp * self._mesh.sizes.cp

    def drop_gathered(self) -> None:
        """Drops gathered parameters, which passes may leave, so that `parameters()` are this rank's shards again."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def synchronize_gradients(self, synchronize: bool) -> None:
        """Whether a backward pass reduces gradients over ranks, or adds to whole ones that a later pass reduces."""
        if isinstance(self, FSDPModule):
            self.set_requires_gradient_sync(synchronize)

    def deferred_gradients(self) -> Iterator[torch.Tensor]:
        """This rank's whole gradients that are not reduced yet; FSDP keeps them beside its parameters."""
        for parameter in self._fsdp_parameters():
            if parameter.unsharded_accumulated_grad is not None:
                yield parameter.unsharded_accumulated_grad
            if hasattr(parameter, "_unsharded_param") and parameter.unsharded_param.grad is not None:
                yield parameter.unsharded_param.grad

    def drop_deferred_gradients(self) -> None:
        """Drops gradients that were not reduced yet."""
        for parameter in self._fsdp_parameters():
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter.unsharded_param.grad = None

    def _fsdp_parameters(self) -> Iterator[FSDPParam]:
        for module in self.modules():
            group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
            yield from group.fsdp_params if group is not None else ()

    def forward(
        self, batch: PackedBatch, transform: LogitTransform, *, logits: bool = False, likely: int = 0
    ) -> RowOutput:
        """See `score_row`."""
        if self._one_each:
            check_one_sequence(batch.shape[0])
        if self.replay is not None:
            self.replay.check(batch.routes)
            routes = None if batch.routes is None else batch.routes.part(self._cut.mine(batch))
            counts = self.training and torch.is_grad_enabled()
            for target in self.replay.targets:
                target.aim(RouterPass(routes), recomputes=False, counts=counts)
        hidden_TD = self._hidden(batch)
        head = self.lm.get_output_embeddings()
        weight_WD = local_tensor(head.weight)
        bias_W = None if head.bias is None else local_tensor(head.bias)
        if self._head_dtype is not None:
            hidden_TD, weight_WD = hidden_TD.to(self._head_dtype), weight_WD.to(self._head_dtype)
            bias_W = None if bias_W is None else bias_W.to(self._head_dtype)
        projection = Projection(weight_WD, bias_W, self._mesh.tp_group, self._chunk)
        return score_row(hidden_TD, projection, batch, transform, self._cut, logits=logits, likely=likely)

    def _hidden(self, batch: PackedBatch) -> torch.Tensor:
        mine = self._cut.mine(batch)
        output = self.lm.base_model(
            input_ids=batch.input_ids_T[None, mine],
            position_ids=batch.position_ids_T[None, mine],
            attention_mask=None,
            use_cache=False,
            segments=self._cut.segments(batch),
        )
        hidden = output.last_hidden_state
        if isinstance(hidden, DTensor):
            # Sequence parallel: scoring needs all tokens, and hands back a gradient that is complete on every rank.
            hidden = hidden.full_tensor(grad_placements=[Replicate()])
        return hidden.squeeze(0)

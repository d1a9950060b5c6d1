"""A causal language model together with the scoring of its tokens, as one module.

FSDP2 gathers the output projection around a module's forward; scoring therefore lives inside it. Feeds packed rows to
the model, on this rank's slice of the row with context parallelism. Knows no batches and no losses. Invariant: every
rank of a replica returns the same scores for the whole row, and gradients flow into this rank's part only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from nemo_rl.models.dtensor.attention import Segments
from nemo_rl.models.dtensor.mesh import ParallelMesh
from nemo_rl.models.dtensor.parallelize import local_tensor
from nemo_rl.models.dtensor.scoring import LogitTransform, TokenScores, copy_to_ranks, gather_logits, local_logits, score_tokens
from nemo_rl.models.policy.packed import PackedBatch


class CausalLMScorer(nn.Module):
    """Wraps a Hugging Face causal language model.

    Args:
        model: The model, cut over tensor-parallel ranks where there are several.
        mesh: This rank's groups.
        chunk: Tokens whose logits exist at a time; None chooses.
        compiled: Whether the scoring of a chunk is compiled.
        head_dtype: Precision of the output projection's product; None takes that of the model.
    """

    def __init__(self, model: Any, mesh: ParallelMesh, chunk: int | None, *, compiled: bool = False, head_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.lm = model
        self._mesh = mesh
        self._chunk = chunk
        self._compiled = compiled
        self._head_dtype = head_dtype

    def row_multiple(self) -> int:
        """A row's length must be a multiple of this."""
        return self._mesh.sizes.tp * self._mesh.sizes.cp

    def reshard(self) -> None:
        """Drops gathered parameters after passes without a backward, so that `parameters()` are this rank's shards again."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def synchronize_gradients(self, synchronize: bool) -> None:
        """Whether a backward pass reduces gradients over ranks, or adds to whole ones that a later pass reduces."""
        if isinstance(self, FSDPModule):
            self.set_requires_gradient_sync(synchronize)

    def drop_deferred_gradients(self) -> None:
        """Drops gradients that were not reduced yet."""
        for module in self.modules():
            group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
            for parameter in group.fsdp_params if group is not None else ():
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter.unsharded_param.grad = None

    def forward(self, batch: PackedBatch, transform: LogitTransform, *, logits: bool = False) -> TokenScores | torch.Tensor:
        """Scores of the row's targets, or with `logits` the transformed logits [T, V] themselves."""
        hidden_TD, target_T = self._hidden(batch)
        head = self.lm.get_output_embeddings()
        weight_WD = local_tensor(head.weight)
        bias_W = None if head.bias is None else local_tensor(head.bias)
        if self._head_dtype is not None:
            hidden_TD, weight_WD = hidden_TD.to(self._head_dtype), weight_WD.to(self._head_dtype)
            bias_W = None if bias_W is None else bias_W.to(self._head_dtype)
        group = self._mesh.tp_group
        if logits:
            raw_TV = gather_logits(local_logits(copy_to_ranks(hidden_TD, group), weight_WD, bias_W), group)
            return self._whole_row(transform.model_logits(raw_TV))
        wanted = self._wanted_here(batch, hidden_TD.shape[0])
        if wanted is not None:
            hidden_TD, target_T = hidden_TD[wanted], target_T[wanted]
        scores = score_tokens(hidden_TD, weight_WD, bias_W, target_T, transform, chunk=self._chunk, group=group, compiled=self._compiled)
        logprobs_T = self._whole_row(_placed(scores.logprobs_T, wanted, batch, self._mesh.sizes.cp))
        if not transform.filters:
            return TokenScores(logprobs_T, logprobs_T)
        return TokenScores(logprobs_T, self._whole_row(_placed(scores.unfiltered_T, wanted, batch, self._mesh.sizes.cp)))

    def _wanted_here(self, batch: PackedBatch, tokens: int) -> torch.Tensor | None:
        """Wanted positions inside this rank's slice of the row."""
        if batch.wanted_W is None or self._mesh.cp_group is None:
            return batch.wanted_W
        local = batch.wanted_W - tokens * self._mesh.cp_rank
        local = local[(local >= 0) & (local < tokens)]
        return local if local.numel() else local.new_zeros(1)

    def _hidden(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = batch.input_ids_T.shape[0] // self._mesh.sizes.cp
        start = tokens * self._mesh.cp_rank
        mine = slice(start, start + tokens)
        segments = Segments(batch.cu_seqlens, batch.max_seqlen, self._mesh.cp_group, start)
        output = self.lm.base_model(
            input_ids=batch.input_ids_T[None, mine],
            position_ids=batch.position_ids_T[None, mine],
            attention_mask=None,
            use_cache=False,
            segments=segments,
        )
        hidden = output.last_hidden_state
        if isinstance(hidden, DTensor):
            # Sequence parallel: scoring needs all tokens, and hands back a gradient that is complete on every rank.
            hidden = hidden.full_tensor(grad_placements=[Replicate()])
        return hidden.squeeze(0), batch.target_ids_T[mine]

    def _whole_row(self, local: torch.Tensor) -> torch.Tensor:
        """Every slice of the row; only this rank's carries a gradient, so that the sum over ranks counts each token once."""
        group = self._mesh.cp_group
        if group is None:
            return local
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, local.detach().contiguous(), group=group)
        parts[self._mesh.cp_rank] = local
        return torch.cat(parts)


def _placed(scores: torch.Tensor, wanted: torch.Tensor | None, batch: PackedBatch, slices: int) -> torch.Tensor:
    """Scores at their positions of the (slice of the) row, zero elsewhere."""
    if wanted is None:
        return scores
    return scores.new_zeros(batch.input_ids_T.shape[0] // slices).index_copy(0, wanted, scores)

"""Our parts of Megatron's model: exact attention over packed rows, rotary positions that restart in every sequence,
norms.

They fill slots of Megatron's layer specifications, so both training backends attend alike with and without Transformer
Engine. Invariant: a sequence's result does not depend on what it was packed with, nor on how the row is cut over
context-parallel ranks.

Shapes: T tokens of this rank's slice of the row, H heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import make_viewless_tensor
from torch import nn

from nemo_rl.models.policy.attention import Segments, packed_attention

if TYPE_CHECKING:
    from collections.abc import Callable

    from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding


@dataclass
class PackedRow(PackedSeqParams):
    """The packed-sequence argument that Megatron passes from layer to layer: the borders of the row's sequences.

    It sets no packed format of Megatron's own, so that its layers treat the row as one sequence; attention and
    positions are ours.
    """

    qkv_format: str = "sbhd"
    segments: Segments | None = None
    ahead_KT: torch.Tensor | None = None  # token that stands 1, 2, ... K after each; None to predict no further tokens


class PackedAttention(MegatronModule):
    """Attention of every token to the earlier ones of its own sequence, as `core_attention`."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, softmax_scale: float | None = None, **_: object
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self._scale = softmax_scale
        self.factor = 1.0  # of the scale, for rotary positions that scale queries and keys

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        packed_seq_params: PackedRow,
        **_: object,
    ) -> torch.Tensor:
        """[T, 1, H * D] from query, key and value [T, 1, H, D]."""
        if packed_seq_params.segments is None:
            raise ValueError("packed attention needs the borders of the row's sequences")
        scale = self._scale
        if self.factor != 1.0:
            scale = self.factor * (query.shape[-1] ** -0.5 if scale is None else scale)
        heads_first = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        out_1THD, _weights = packed_attention(
            self, *heads_first, None, scaling=scale, segments=packed_seq_params.segments
        )
        return out_1THD.flatten(2).transpose(0, 1)


class RowNorm(nn.Module):
    """RMS norm (https://arxiv.org/abs/1910.07467) in float32, where Transformer Engine's is absent.

    With sequence parallelism each rank normalises its own tokens; the mark on the weight makes Megatron add up the
    ranks' gradients.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 - Megatron's mark
        self._eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same shape and precision."""
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        return self.weight * wide.to(hidden.dtype)


class PackedGPT(GPTModel):
    """Megatron's GPT over packed rows: gives the final hidden states instead of logits, which are never whole.
    `angles_D`: rotary frequencies of the model, half a head wide. `rotary_factor`: of rotated queries and keys, which
    attention's scale takes over. `options`: of `GPTModel`.
    """

    def __init__(self, *, angles_D: torch.Tensor, rotary_factor: float = 1.0, **options: object) -> None:
        super().__init__(position_embedding_type="none", **options)
        for module in self.modules():
            if isinstance(module, PackedAttention):
                module.factor = rotary_factor**2
        self.register_buffer("angles_D", angles_D, persistent=False)
        self.angles_D: torch.Tensor

    def _preprocess(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **options: object) -> object:
        prepared = list(super()._preprocess(input_ids=input_ids, position_ids=position_ids, **options))
        half_TD = position_ids.reshape(-1, 1).float() * self.angles_D
        prepared[1] = torch.cat([half_TD, half_TD], dim=-1)[:, None, None, :]
        if prepared[0] is not None and self.config.recompute_granularity is not None and torch.is_grad_enabled():
            # Recomputed layers have gradients only if their input has one, and a frozen embedding's output has none.
            prepared[0].requires_grad_()
        return tuple(prepared)

    def _postprocess(
        self,
        hidden_states: torch.Tensor,
        *,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        rotary_pos_emb: torch.Tensor,
        packed_seq_params: PackedRow,
        **_: object,
    ) -> torch.Tensor:
        """[T, 1, D]; with tokens ahead [(1 + K) * T, 1, D], those of each prediction layer after the model's own."""
        if not self.mtp_process or packed_seq_params.ahead_KT is None:
            return hidden_states
        return self.mtp(
            input_ids=input_ids,
            position_ids=position_ids,
            hidden_states=hidden_states,
            attention_mask=None,
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=packed_seq_params,
            embedding=self.embedding,
        )


class PackedPrediction(MultiTokenPredictionLayer):
    """Megatron's layer of multi-token prediction over packed rows: the tokens that it reads come with the row, for
    Megatron would shift them over the borders of sequences and of context-parallel ranks' slices.
    """

    def _get_embeddings(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        embedding: LanguageModelEmbedding,
        hidden_states: torch.Tensor,
        packed_seq_params: PackedRow,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        if packed_seq_params.ahead_KT is None:
            raise ValueError("multi-token prediction needs the tokens that stand after those of the row")
        ahead_1T = packed_seq_params.ahead_KT[self.layer_number - 1][None]
        read = embedding(input_ids=ahead_1T, position_ids=position_ids)
        hidden_states = make_viewless_tensor(inp=hidden_states, requires_grad=True, keep_graph=True)
        return input_ids, position_ids, read, hidden_states

    def _checkpointed_forward(
        self, forward_func: Callable[..., object], *, packed_seq_params: PackedRow, **options: object
    ) -> torch.Tensor:
        # Megatron would save the row as a tensor, and hands options over by their place, of which these two are last.
        options.pop("sequence_len_offset")
        return super()._checkpointed_forward(partial(forward_func, packed_seq_params=packed_seq_params), **options)

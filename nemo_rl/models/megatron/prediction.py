"""Multi-token prediction (https://arxiv.org/abs/2412.19437, section 2.2): inputs and targets of its layers, its loss,
and its weights.

Layer k of K reads the hidden state of the layer before it and the token k places on, and predicts the token after that.
Its loss counts the tokens that the loss of the step counts, each with that loss's own weight, and is divided with it at
the end of the step (`docs/train_step.md`). Invariants: nothing is predicted across the borders of a sequence; the loss
does not depend on how the batch was cut, nor over which ranks; layers run only where a backward pass follows.

Shapes: B sequences, S padded width, T tokens of this rank's slice of the row, W scored ones of these, D hidden size.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from nemo_rl.distributed.devices import to_device
from nemo_rl.loss.interfaces import EPSILON, LossFunction, LossType
from nemo_rl.models.megatron.families import Naming, Sizes, Weight, prediction_weights_of
from nemo_rl.models.megatron.groups import MegatronGroups
from nemo_rl.models.megatron.sharded_weights import ModelFiles, ShardedWeights
from nemo_rl.models.policy.model_config import CheckpointMismatchError
from nemo_rl.models.policy.packed import PackedBatch, Projection, RowSlice
from nemo_rl.models.policy.scoring import LogitTransform, score_tokens
from nemo_rl.models.policy.train_step import MicrobatchResult

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

_KEY = "policy.megatron_cfg.mtp_num_layers"
FOLDER = "mtp"
"""Of a checkpoint's weights. Engines load every file beside the model's own, and know no such layers."""


@dataclass(frozen=True)
class Ahead:
    """Inputs and targets of one layer, for this rank's slice of a row.

    Attributes:
        read_T: The token that the layer reads at each position; 0 where the sequence has ended.
        wanted_W: Positions whose prediction counts; one of weight 0 if there is none.
        target_W: Target tokens there.
        weight_W: Weights of their losses.
    """

    read_T: torch.Tensor
    wanted_W: torch.Tensor
    target_W: torch.Tensor
    weight_W: torch.Tensor


def tokens_ahead(
    data: Mapping[str, torch.Tensor] | None, batch: PackedBatch, cut: RowSlice, loss_fn: LossFunction, depths: int
) -> list[Ahead]:
    """Inputs and targets of each layer.

    Args:
        data: The microbatch that was packed; None for an idle one, of which nothing counts.
        depths: How many layers there are.
    """
    device, mine = batch.input_ids_T.device, cut.mine(batch)
    source_N, tokens = batch.source_N.cpu(), len(batch.input_ids_T)
    ids_BS = torch.zeros(batch.shape, dtype=torch.long)
    weight_BS, lengths_B = torch.zeros(batch.shape), torch.zeros(batch.shape[0], dtype=torch.long)
    if data is not None:
        ids_BS, lengths_B = data["input_ids"].cpu(), data["input_lengths"].cpu().long()
        weight_BS = _token_weights(data, loss_fn.loss_type)

    def on_row(values_BS: torch.Tensor, places: int) -> torch.Tensor:
        """The values so many places on inside each sequence, 0 beyond its end, of this rank's slice."""
        ahead_BS = torch.zeros_like(values_BS)
        ahead_BS[:, :-places] = values_BS[:, places:]
        ahead_BS.masked_fill_(torch.arange(batch.shape[1]) + places >= lengths_B[:, None], 0)
        row_T = ahead_BS.new_zeros(tokens)
        row_T[: len(source_N)] = ahead_BS.reshape(-1)[source_N]
        return row_T[mine]

    ids_KT = [on_row(ids_BS, places) for places in range(1, depths + 2)]
    found = []
    for depth in range(1, depths + 1):
        weight_T = on_row(weight_BS, depth + 1)
        wanted_W = weight_T.nonzero(as_tuple=True)[0]
        # Every rank must run the output projection, whose backward pass is collective, even when it trains on nothing.
        wanted_W = wanted_W if wanted_W.numel() else torch.zeros(1, dtype=torch.long)
        parts = (ids_KT[depth - 1], wanted_W, ids_KT[depth][wanted_W], weight_T[wanted_W])
        found.append(Ahead(*(to_device(part, device) for part in parts)))
    return found


def _token_weights(data: Mapping[str, torch.Tensor], level: LossType) -> torch.Tensor:
    """Weight of each token [B, S] in the sum that the step divides by its tokens, or by its sequences: there each
    sequence has the mean over its own tokens.
    """
    mask_BS = data["token_mask"].cpu().float() if "token_mask" in data else torch.ones(data["input_ids"].shape)
    if level is LossType.SEQUENCE_LEVEL:
        mask_BS = mask_BS / (mask_BS[:, 1:].sum(dim=1, keepdim=True) + EPSILON)
    return mask_BS * data["sample_mask"].cpu().float()[:, None]


class Predictions:
    """The loss of multi-token prediction. `config`: Megatron's of the model."""

    def __init__(self, config: TransformerConfig, groups: MegatronGroups) -> None:
        self.depths = int(config.mtp_num_layers or 0)
        self._factor = float(config.mtp_loss_scaling_factor or 0.0)
        self._groups = groups

    def loss(
        self, hidden_KTD: Sequence[torch.Tensor], ahead: Sequence[Ahead], head: Projection, transform: LogitTransform
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of the loss, and the whole row's sum [K] for each layer before the factor.

        Args:
            hidden_KTD: Each layer's hidden states, the same on every rank that shares the vocabulary.
            transform: Its scaling by the model itself is all that counts here: no token was drawn from these.
        """
        plain = LogitTransform(softcap=transform.softcap, scale=transform.scale)
        sums = []
        for hidden_TD, of in zip(hidden_KTD, ahead, strict=True):
            scores = score_tokens(
                hidden_TD[of.wanted_W],
                head.weight_WD,
                head.bias_W,
                of.target_W,
                plain,
                chunk=head.chunk,
                group=head.group,
            )
            sums.append(-(scores.logprobs_T.float() * of.weight_W).sum())
        sums_K = torch.stack(sums)
        whole_K = sums_K.detach().clone()
        if self._groups.sizes.cp > 1:
            dist.all_reduce(whole_K, group=self._groups.cp_group)
        # On the host where it travels to stages that have another device.
        return sums_K.sum() * (self._factor / self.depths), whole_K if self._groups.sizes.pp == 1 else whole_K.cpu()


def with_prediction_metrics(result: MicrobatchResult, sums_K: torch.Tensor) -> MicrobatchResult:
    """The result with the loss of each layer, which the step divides as it divides the gradient."""
    found = {f"mtp/mtp_{number} loss": value for number, value in enumerate(sums_K, start=1)}
    return replace(result, metrics={**result.metrics, **found})


def prediction_block(config: TransformerConfig, layers: object, virtual: int | None, *, engine: bool) -> object:
    """Megatron's specification of the prediction layers of one chunk; None on chunks without. `layers`: its
    specification of the model's.
    """
    if not config.mtp_num_layers:
        return None
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    from nemo_rl.models.megatron.packed_layers import PackedPrediction, RowNorm

    block = get_gpt_mtp_block_spec(config, layers, use_transformer_engine=engine, vp_stage=virtual)
    for spec in (block.layer_specs or []) if block is not None else []:
        spec.module = PackedPrediction
        if not engine:
            parts = spec.submodules
            parts.enorm = parts.hnorm = parts.layer_norm = RowNorm
    return block


class PredictingWeights(ShardedWeights):
    """Parameters of a model with multi-token prediction layers. These are in no file of the families and in no engine:
    they are drawn at a run's start, and kept in a folder of its checkpoints.

    Args:
        chunks: This rank's parts of the model.
        naming: Of its kind of layers.
        depths: Number of prediction layers.
        start: The model that the run starts from.
        spread: Standard deviation of the initial weights.
    """

    def __init__(
        self,
        chunks: Iterable[nn.Module],
        sizes: Sizes,
        naming: Naming,
        groups: MegatronGroups,
        *,
        depths: int,
        start: str,
        spread: float,
    ) -> None:
        self._predicting = list(prediction_weights_of(sizes, naming, depths))
        self._depths, self._start, self._spread = depths, start, spread
        super().__init__(chunks, sizes, naming, groups, self._predicting)

    def load(self, source: str) -> None:
        """See `ShardedWeights`. Raises CheckpointMismatchError also where the source holds another number of layers."""
        super().load(source)
        folder = Path(source) / FOLDER
        files = ModelFiles(str(folder)) if folder.is_dir() else None
        held = len({name.split(".")[2] for name in files.names()}) if files is not None else 0
        if held != self._depths and (held or source != self._start):
            raise CheckpointMismatchError(
                f"{source}: holds {held} layers of multi-token prediction, and {_KEY} is {self._depths}; set it to "
                f"{held}, or start another run from a model without any, which draws them"
            )
        self.put(self._predicting, self._drawn if files is None else files.whole)

    def _drawn(self, weight: Weight) -> torch.Tensor:
        return weight.join([drawn(name, shape, self._spread) for name, shape in weight.parts])

    def predicting(self, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and full tensors of the prediction layers. Collective over the replica."""
        return self.gathered(self._predicting, None, device)


def drawn(name: str, shape: tuple[int, ...], spread: float) -> torch.Tensor:
    """A parameter at a run's start, by its name alone, so that it is the same on every grid."""
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.empty(shape).normal_(0.0, spread, generator=generator)

"""Microbatches through Megatron's pipeline schedules: input of the first stage, scores of the last.

Packs rows, cuts them over context-parallel ranks and scores the last stage's hidden states. Invariants: every rank of a
replica returns the last stage's result; a failure of the last stage is raised on all ranks, so none waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nemo_rl.loss.interfaces import LossFunction
from nemo_rl.models.megatron import cpu
from nemo_rl.models.megatron.groups import MegatronGroups
from nemo_rl.models.megatron.model import BuiltModel, unwrap
from nemo_rl.models.megatron.prediction import Ahead, Predictions, tokens_ahead, with_prediction_metrics
from nemo_rl.models.megatron.routers import Routers
from nemo_rl.models.policy.packed import PackedBatch, Projection, RowOutput, RowSlice, idle_microbatch, pack, score_row
from nemo_rl.models.policy.scoring import LikelyTokens, LogitTransform

if TYPE_CHECKING:
    from megatron.core.models.gpt.gpt_model import GPTModel

# Turns the row's output on the last stage into the loss to differentiate and the result to return.
Ending = Callable[[Mapping[str, torch.Tensor], PackedBatch, RowOutput], tuple[torch.Tensor, Any]]


class PipelineStageError(RuntimeError):
    """Another pipeline stage of this replica failed."""


class Pipeline:
    """Passes of one rank.

    Args:
        chunk_size: Tokens whose logits exist at once; None for all.
        row_round: Packed rows are padded to a multiple of this too.
        routers: The model's routers; made from the model by default, without replay.
    """

    def __init__(
        self,
        model: BuiltModel,
        groups: MegatronGroups,
        chunk_size: int | None,
        row_round: int = 1,
        routers: Routers | None = None,
    ) -> None:
        self._routers = routers or Routers(model, groups, replays=False)
        self.chunks: list[nn.Module] = model.chunks
        self._model, self._groups, self._chunk_size = model, groups, chunk_size
        sizes = groups.sizes
        self._row_multiple = math.lcm(sizes.tp * sizes.cp, row_round)
        self._predictions = Predictions(model.config, groups)
        self._cut = RowSlice(groups.cp_group if sizes.cp > 1 else None, groups.cp_group.rank(), sizes.cp)

    def run(
        self,
        microbatches: Sequence[Mapping[str, torch.Tensor]],
        idle: int,
        ending: Ending,
        transform: LogitTransform,
        *,
        backward: bool,
        logits: bool = False,
        likely: int = 0,
        trained_only: bool = False,
        loss_fn: LossFunction | None = None,
    ) -> list[Any]:
        """Runs the microbatches; returns the results of `ending` in their order, on every rank of the replica.

        Args:
            idle: Empty microbatches after them, so that every replica runs as many.
            ending: Called on the last stage.
            logits: Whether `ending` takes logits rather than scores.
            likely: How many of the most likely tokens `ending` takes rather than scores; 0 for none.
            trained_only: Whether only trained tokens are scored.
            loss_fn: Loss that rows are packed for, or None.

        Raises PipelineStageError: `ending` failed on the last stage, and this is another one; there it raises its own.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        cpu.install()
        virtual = self._model.config.virtual_pipeline_model_parallel_size
        # The interleaved schedule takes microbatches in groups as large as the pipeline.
        idle += -(len(microbatches) + idle) % self._groups.sizes.pp if virtual else 0
        rows: list[Mapping[str, torch.Tensor] | None] = [*microbatches, *([None] * idle)]

        self._routers.start_run()
        failures: list[Exception] = []

        def guarded(
            data: Mapping[str, torch.Tensor], batch: PackedBatch, output: RowOutput
        ) -> tuple[torch.Tensor, object]:
            try:
                return ending(data, batch, output)
            except Exception as error:
                if self._groups.sizes.pp == 1:
                    raise
                # Other stages wait for this one's gradients: it goes on with nothing, and all fail together.
                failures.append(error)
                return _nothing(output), None

        def forward(
            batches: Iterator[Mapping[str, torch.Tensor] | None], chunk: nn.Module
        ) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, object]]]:
            data = next(batches)
            real = data is not None
            batch = pack(
                idle_microbatch() if data is None else data,
                self._groups.device,
                multiple=self._row_multiple,
                trained_only=trained_only and real,
                loss_fn=loss_fn if real else None,
            )
            self._routers.aim(chunk, data, batch, self._cut, loss_fn if backward else None)
            ahead: list[Ahead] = []
            if backward and loss_fn is not None and unwrap(chunk).mtp_process:
                ahead = tokens_ahead(data, batch, self._cut, loss_fn, self._predictions.depths)
            output = self._through(chunk, batch, ahead)
            return output, partial(self._end, data, batch, ahead, guarded, transform, logits, likely, chunk)

        results = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(rows) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(rows),
            seq_length=1,
            micro_batch_size=1,
            forward_only=not backward,
        )
        self._raise_together(failures)
        return self._groups.from_last_stage(list(results)[: len(microbatches)] if self._groups.is_last_stage else None)

    def _raise_together(self, failures: Sequence[Exception]) -> None:
        said = self._groups.from_last_stage([f"{type(error).__name__}: {error}" for error in failures])
        if failures:
            raise failures[0]
        if said:
            raise PipelineStageError(f"the last pipeline stage of this replica failed: {said[0]}")

    def _through(self, chunk: GPTModel, batch: PackedBatch, ahead: Sequence[Ahead]) -> torch.Tensor:
        from nemo_rl.models.megatron.packed_layers import PackedRow

        mine = self._cut.mine(batch)
        read_KT = torch.stack([of.read_T for of in ahead]) if ahead else None
        row = PackedRow(segments=self._cut.segments(batch), ahead_KT=read_KT)
        return chunk(
            input_ids=batch.input_ids_T[None, mine],
            position_ids=batch.position_ids_T[None, mine],
            attention_mask=None,
            packed_seq_params=row,
        )

    def _end(
        self,
        data: Mapping[str, torch.Tensor] | None,
        batch: PackedBatch,
        ahead: Sequence[Ahead],
        ending: Ending,
        transform: LogitTransform,
        logits: bool,
        likely: int,
        chunk: GPTModel,
        hidden: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, object]:
        hidden_TD, *predicting_KTD = (self._whole(part) for part in hidden.chunk(1 + len(ahead)))
        gpt = unwrap(chunk)
        weight_WD = gpt.shared_embedding_or_output_weight() if self._model.sizes.tied else gpt.output_layer.weight
        group = self._groups.tp_group if self._groups.sizes.tp > 1 else None
        head = Projection(weight_WD, None, group, self._chunk_size)
        output = score_row(
            hidden_TD,
            head,
            batch,
            transform,
            self._cut,
            logits=logits,
            likely=likely,
        )
        # Megatron divides by a number of tokens unless losses are declared to be sums, as they are here.
        no_tokens = torch.zeros((), dtype=torch.int, device=hidden.device)
        loss, result = (_nothing(output), None) if data is None else ending(data, batch, output)
        if ahead:
            further, sums_K = self._predictions.loss(predicting_KTD, ahead, head, transform)
            loss = loss + further
            result = None if result is None else with_prediction_metrics(result, sums_K)
        return loss, no_tokens, result

    def _whole(self, hidden_T1D: torch.Tensor) -> torch.Tensor:
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        if self._model.config.sequence_parallel:
            # Scoring needs all tokens, and hands back a gradient that is complete on every rank.
            hidden_T1D = gather_from_sequence_parallel_region(hidden_T1D, tensor_parallel_output_grad=False)
        return hidden_T1D.squeeze(1)


def _nothing(output: RowOutput) -> torch.Tensor:
    """A loss that is zero, with gradients that are."""
    if isinstance(output, LikelyTokens):
        return output.logprobs_Tk.sum() * 0.0
    scores = output if isinstance(output, torch.Tensor) else output.unfiltered_T
    return scores.sum() * 0.0

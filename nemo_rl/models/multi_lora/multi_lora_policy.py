"""A policy with adapter slots, over a group of workers: one frozen base model, trained and scored for several adapters
in one call.

Safe to call from several threads; calls run one after the other, so that all ranks see them in one order.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch

from nemo_rl.config import PolicyConfig
from nemo_rl.data_plane.field_schema import PROMPT, PROMPT_TOKENS, TAG, replayed_fields
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.loss.interfaces import LossFunction
from nemo_rl.models.multi_lora.messages import SLOT, StepRefused
from nemo_rl.models.policy.batches import refuse_model_inputs, shard_rows, tags_of
from nemo_rl.models.policy.interfaces import TrainResult
from nemo_rl.models.policy.lm_policy import Policy

WORKER = "nemo_rl.models.multi_lora.multi_lora_worker.MultiLoraWorker"


def trained_lengths(data: BatchedDataDict) -> torch.Tensor:
    """Lengths of rows up to their last trained token [B], at least 1. No trained token sees what follows it, such as
    the environment's closing message.
    """
    mask_BS = data["token_mask"] != 0
    position_S = torch.arange(1, mask_BS.shape[1] + 1)
    return torch.minimum(data["input_lengths"], (mask_BS * position_S).amax(dim=1).clamp(min=1))


def with_own_prompts(data: BatchedDataDict) -> BatchedDataDict:
    """The rows, with prompts numbered apart by adapter, and none longer than its row."""
    data = BatchedDataDict({**data})
    for name in tags_of(data):
        if name == TAG + PROMPT:
            slots_B = data[SLOT]
            data[name] = data[name] * (slots_B.max() + 1) + slots_B
        elif name == TAG + PROMPT_TOKENS:
            data[name] = torch.minimum(data[name], data["input_lengths"])
    return data


class MultiLoraPolicy(Policy):
    """See `Policy`; the arguments are its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._turn = threading.RLock()
        self._stepped: dict[int, dict[str, torch.Tensor]] = {}  # factors since the last step, until they are asked for

    def _in_turn(self, method: str, **kwargs: Any) -> list[Any]:
        with self._turn:
            return self.worker_group.run(method, **kwargs)

    # -- slots --------------------------------------------------------------------------------------------------------

    def fill_slot(
        self,
        slot: int,
        cfg: PolicyConfig,
        weights_path: str | None = None,
        optimizer_path: str | None = None,
        steps_done: int = 0,
    ) -> int:
        """Puts an adapter into an empty slot, at its start or from a checkpoint. Returns bytes that it takes on each
        rank. Raises WorkerError: the checkpoint is of another base, rank or optimizer.
        """
        start = {"weights_path": weights_path, "optimizer_path": optimizer_path, "steps_done": steps_done}
        return self._in_turn("fill_slot", slot=slot, policy=cfg, **start)[0]

    def clear_slot(self, slot: int) -> None:
        """Empties a slot."""
        with self._turn:
            self._stepped.pop(slot, None)
            self.worker_group.run("clear_slot", slot=slot)

    def free_bytes(self) -> int:
        """Device memory that is left for adapters, of the rank with least."""
        return min(self._in_turn("free_bytes"))

    def slot_factors(self, slot: int) -> dict[str, torch.Tensor]:
        """A slot's factors in float32, by `<layer>.lora_A` and `<layer>.lora_B`."""
        stepped = self._stepped.pop(slot, None)
        if stepped is not None:
            return stepped
        return self._in_turn("slot_factors", slots=[slot])[0][slot]

    def save_slot(self, slot: int, weights_path: str, optimizer_path: str | None) -> None:
        """Snapshots an adapter; its files are complete once `slot_written`."""
        self._in_turn("save_slot", slot=slot, weights_path=weights_path, optimizer_path=optimizer_path)

    def slot_written(self, slot: int) -> bool:
        """Whether a slot's last snapshot is on disk. Raises WorkerError: it cannot be written."""
        return all(self._in_turn("slot_written", slot=slot))

    # -- passes -------------------------------------------------------------------------------------------------------

    def train_adapters(
        self, data: BatchedDataDict, losses: Mapping[int, LossFunction]
    ) -> dict[int, TrainResult | StepRefused]:
        """One optimizer step of each adapter on its rows.

        Args:
            data: Rows of all, with a column `SLOT` [B].
            losses: By slot; their adapters draw tokens by the same temperature and filters.

        Returns per slot the result of its step, or why it was refused. Raises WorkerError: a worker failed.
        """
        refuse_model_inputs(data)
        data = with_own_prompts(BatchedDataDict({**data, "input_lengths": trained_lengths(data)}))
        with self._turn:
            shards, _ = shard_rows(data, self.cfg, self.data_parallel_size, training=True, share=self.shares_prompts)
            for slot in losses:
                self._stepped.pop(slot, None)
            ranks = self._run_sharded("train_adapters", shards, losses=losses, mbs=self.cfg.train_micro_batch_size)
            # One call for all: each adapter's own would wait for passes of others.
            found: list[dict[int, dict[str, torch.Tensor]]] = self.worker_group.run("slot_factors", slots=list(losses))
            self._stepped |= found[0]
        results: dict[int, TrainResult | StepRefused] = {}
        for slot in losses:
            reports = [rank[slot] for rank in ranks]
            refused = next((report for report in reports if isinstance(report, StepRefused)), None)
            results[slot] = refused or self._aggregate(reports, training=True)
        return results

    def score_adapters(self, data: BatchedDataDict, *, policy: bool, reference: bool) -> BatchedDataDict:
        """`logprobs` [B, S] of rows under their adapters, and `reference_logprobs` under the base model. `data`: rows
        with a column `SLOT` [B]. Raises WorkerError: a worker failed.
        """
        refuse_model_inputs(data)
        names = ("input_ids", "input_lengths", SLOT, *replayed_fields(data, routes=policy), *tags_of(data))
        columns = with_own_prompts(BatchedDataDict({name: data[name] for name in names}))
        with self._turn:
            shards, order = shard_rows(
                columns, self.cfg, self.data_parallel_size, training=False, share=self.shares_prompts
            )
            parts = self._run_sharded("score_adapters", shards, policy=policy, reference=reference)
        merged = BatchedDataDict.from_batches(parts)
        return merged if order is None else merged.reorder_data(order)

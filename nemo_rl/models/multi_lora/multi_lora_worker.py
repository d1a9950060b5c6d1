"""Ray actor class of one rank of a policy with adapter slots.

Trains and scores rows of several adapters in one call. Invariants: every method is called on all ranks in the same
order; what goes wrong with one adapter is reported for it and changes nothing of the others.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch
from typing_extensions import override

from nemo_rl.config import PolicyConfig
from nemo_rl.config.world_sizes import parallel_sizes
from nemo_rl.data_plane.field_schema import SAMPLING_MASK_FIELDS
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.devices import allowed_memory
from nemo_rl.loss.interfaces import LossFunction
from nemo_rl.models.multi_lora.messages import SLOT, StepRefused
from nemo_rl.models.multi_lora.multi_lora_backend import MultiLoraBackend, build_backend
from nemo_rl.models.policy.backend import Backend
from nemo_rl.models.policy.batches import RECORDED
from nemo_rl.models.policy.policy_worker import PolicyWorker, prepare_process, stacked_rows
from nemo_rl.models.policy.train_step import MicrobatchResult, NonFiniteStepError, TrainStep, step_report


class MultiLoraWorker(PolicyWorker):
    """One rank. See `PolicyWorker`."""

    multi: MultiLoraBackend  # `backend`, with its type

    @override
    def build(self, last_step: int | None = None) -> None:
        """Loads the frozen base model onto the accelerator. Collective. For errors see `PolicyWorker.build`."""
        prepare_process()
        self.multi = build_backend(self.cfg, parallel_sizes(self.cfg, int(os.environ["WORLD_SIZE"])))
        self.backend: Backend = self.multi
        self.step = TrainStep(self.backend)

    # -- slots --------------------------------------------------------------------------------------------------------

    def fill_slot(
        self,
        slot: int,
        policy: PolicyConfig,
        weights_path: str | None = None,
        optimizer_path: str | None = None,
        steps_done: int = 0,
    ) -> int:
        """See `MultiLoraBackend.fill`."""
        return self.multi.fill(slot, policy, weights_path, optimizer_path, steps_done)

    def clear_slot(self, slot: int) -> None:
        """Empties a slot."""
        self.multi.clear(slot)

    def free_bytes(self) -> int:
        """Device memory that this rank may still take."""
        return allowed_memory(self.multi.device)

    def slot_factors(self, slots: Sequence[int]) -> dict[int, dict[str, torch.Tensor]]:
        """Factors of each slot on the host, from the first rank; the others give none."""
        return {slot: self.multi.factors(slot) if self.backend.rank == 0 else {} for slot in slots}

    def save_slot(self, slot: int, weights_path: str, optimizer_path: str | None) -> None:
        """Snapshots an adapter; files follow in the background."""
        self.multi.save_adapter(slot, weights_path, optimizer_path)

    def slot_written(self, slot: int) -> bool:
        """Whether the files of a slot's last snapshot are written. Raises OSError: they cannot be."""
        adapter = self.multi.adapters.get(slot)
        return adapter is None or adapter.writer.poll()

    # -- passes -------------------------------------------------------------------------------------------------------

    def train_adapters(
        self, data: BatchedDataDict, losses: Mapping[int, LossFunction], mbs: int
    ) -> dict[int, dict[str, object] | StepRefused]:
        """One step of each adapter of `losses`, on its rows of this rank, which may be none.

        Args:
            data: Rows with a column `SLOT`.
            losses: By slot, the same on every rank; their adapters have one logit transform.
            mbs: Rows of a microbatch where they are neither packed nor dynamic.

        Returns per slot what `PolicyWorker.train` gives, or why its step was refused.
        """
        backend = self.multi
        adapters = {slot: backend.adapters[slot] for slot in sorted(losses)}
        rates = {slot: adapter.rates() for slot, adapter in adapters.items()}
        for slot, adapter in adapters.items():
            adapter.step.abort()
            adapter.step.begin(losses[slot])
        try:
            parts, idle = self._cut(data, mbs)
            ordered = [part.select_indices(part[SLOT].argsort(stable=True)) for part in parts]
            outcomes, failed = backend.forward_backward_slots(ordered, losses, idle=idle)
        except BaseException:
            for adapter in adapters.values():
                adapter.step.abort()
            raise
        # Every rank must know which losses raised anywhere: the next calls are collective.
        raised = torch.tensor([float(slot in failed) for slot in adapters], device=backend.device)
        reports: dict[int, dict[str, object] | StepRefused] = {}
        for slot, bad in zip(adapters, backend.groups.sum_over_data(raised).tolist(), strict=True):
            if bad:
                adapters[slot].step.abort()
                reports[slot] = StepRefused(f"its loss raised {failed.get(slot, 'on another rank')}")
                continue
            reports[slot] = self._finish(slot, outcomes[slot], rates[slot])
        return reports

    def _finish(
        self, slot: int, outcomes: list[tuple[BatchedDataDict, MicrobatchResult]], rates: dict[str, float]
    ) -> dict[str, object] | StepRefused:
        adapter = self.multi.adapters[slot]
        adapter.step.deposit([data for data, _ in outcomes], [result for _, result in outcomes])
        try:
            result = adapter.step.finish(adapter.max_grad_norm)
        except NonFiniteStepError as error:
            return StepRefused(str(error))
        if result.stepped:
            adapter.step_schedule()
        return step_report([result], rates, {})

    def score_adapters(
        self, data: BatchedDataDict, micro_batch_size: int | None = None, *, policy: bool, reference: bool
    ) -> BatchedDataDict:
        """Log-probabilities of rows with a column `SLOT`: `logprobs` under their adapters, `reference_logprobs` under
        the base model, [B, S] each.
        """
        size = micro_batch_size or self.cfg.logprob_batch_size
        parts, idle = self._cut(data, size, replayed=RECORDED if policy else SAMPLING_MASK_FIELDS)
        orders = [part[SLOT].argsort(stable=True) for part in parts]
        ordered = [part.select_indices(order) for part, order in zip(parts, orders, strict=True)]

        def rows(*, of_base: bool) -> torch.Tensor:
            scored = self.multi.logprobs_of_slots(ordered, reference=of_base, idle=idle)
            return stacked_rows((part[order.argsort()] for part, order in zip(scored, orders, strict=True)), data)

        scores = {"logprobs": rows(of_base=False)} if policy else {}
        return BatchedDataDict(scores | ({"reference_logprobs": rows(of_base=True)} if reference else {}))

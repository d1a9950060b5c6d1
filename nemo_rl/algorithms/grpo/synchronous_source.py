"""The synchronous source: rollouts and training take turns."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from contextlib import AbstractContextManager, nullcontext

from nemo_rl.algorithms.grpo.collect import Gathering, WholeBatches, prompts_of
from nemo_rl.algorithms.grpo.experience_source import SourceParts, WholeSteps
from nemo_rl.algorithms.grpo.stages import Experience
from nemo_rl.data.loader import HasState
from nemo_rl.distributed.batched_data_dict import BatchedDataDict


class SynchronousSource(WholeSteps):
    """Generates each step's batch when the step needs it, with the current weights."""

    collector: None = None

    def __init__(self, parts: SourceParts) -> None:
        self._inputs = parts
        self._prompts = prompts_of(parts.config.grpo, parts.loader, parts.state.epoch)
        gathering = Gathering(parts.config.grpo, parts.store, parts.record, parts.timer)
        self._batches = WholeBatches(parts.config, parts.rollouts, gathering, parts.adapter)

    def running(self) -> AbstractContextManager[object]:
        """Does nothing: the loader is already restored, and no rollout runs between steps."""
        return nullcontext()

    def published(self, version: int) -> None:
        """Does nothing: the step starts generation."""

    def next_experience(self) -> Experience:
        """Refits generation if needed and rolls out."""
        accelerators, timer, step = self._inputs.accelerators, self._inputs.timer, self._inputs.state.step
        self._inputs.phase("generation")
        with timer.time("prepare_for_generation/total"):
            accelerators.serve(step)
        with accelerators.demand(step, *self.waited_for()):
            return self._batches.collect(step, self._next_prompts)

    def _next_prompts(self) -> tuple[BatchedDataDict, int]:
        state = self._inputs.state
        try:
            return self._prompts.next(), self._prompts.epoch
        finally:
            if self._prompts.epoch != state.epoch:
                state.epoch, state.step_in_epoch = self._prompts.epoch, 0

    def draw_ahead(self) -> None:
        """Fetches the next batch."""
        if not self.finished():
            self._prompts.prefetch()

    def trained(self) -> Mapping[str, float]:
        """Has no metrics: a trained step leaves no state."""
        return {}

    def finished(self) -> bool:
        """Whether steps or epochs are used up."""
        cfg, state, data = self._inputs.config.grpo, self._inputs.state, self._inputs.config.data
        if state.step >= cfg.max_num_steps:
            return True
        if data.use_multiple_dataloader or cfg.use_dynamic_sampling:
            return not data.use_multiple_dataloader and state.epoch >= cfg.max_num_epochs
        loader, in_last_epoch = self._inputs.loader, state.epoch == cfg.max_num_epochs - 1
        return state.epoch >= cfg.max_num_epochs or (
            in_last_epoch and isinstance(loader, Sized) and state.step_in_epoch >= len(loader)
        )

    def waited_for(self) -> tuple[int, int]:
        """A whole batch, none of it finished."""
        return (0 if self.finished() else self._inputs.config.grpo.num_prompts_per_step), 0

    def position(self) -> tuple[HasState, Mapping[str, object]]:
        """The loader position, before any prefetched batch."""
        return self._prompts.position(), {}

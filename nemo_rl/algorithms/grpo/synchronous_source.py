"""The synchronous source: rollouts and training take turns."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from contextlib import AbstractContextManager, nullcontext

from nemo_rl.algorithms.grpo.collect import Gathering, WholeBatches, prompts_of
from nemo_rl.algorithms.grpo.experience_source import WholeSteps
from nemo_rl.algorithms.grpo.run import GRPORun
from nemo_rl.algorithms.grpo.stages import Experience
from nemo_rl.data.loader import HasState
from nemo_rl.distributed.batched_data_dict import BatchedDataDict


class SynchronousSource(WholeSteps):
    """Generates each step's batch when the step needs it, with the current weights."""

    generates_ahead = False

    def __init__(self, run: GRPORun) -> None:
        self._run = run
        self._prompts = prompts_of(run.config.grpo, run.train_loader, run.state.epoch)
        gathering = Gathering(run.config.grpo, run.store, run.record, run.timer)
        self._batches = WholeBatches(run.config, run.rollouts, gathering, run.adapter)

    @property
    def collector(self) -> None:
        """None: no rollout runs beside training."""

    def start(self) -> None:
        """Does nothing: the loader is already restored."""

    def published(self, version: int) -> None:
        """Does nothing: the step starts generation."""

    def next_experience(self) -> Experience:
        """Refits generation if needed and rolls out."""
        run = self._run
        run.progress.phase("generation")
        with run.timer.time("prepare_for_generation/total"):
            run.accelerators.serve(run.state.step)
        with run.accelerators.demand(run.state.step, *self.waited_for()):
            return self._batches.collect(run.state.step, self._next_prompts)

    def _next_prompts(self) -> tuple[BatchedDataDict, int]:
        state = self._run.state
        try:
            return self._prompts.next(), self._prompts.epoch
        finally:
            if self._prompts.epoch != state.epoch:
                state.epoch, state.step_in_epoch = self._prompts.epoch, 0

    def draw_ahead(self) -> None:
        """Fetches the next batch."""
        if not self.finished():
            self._prompts.prefetch()

    def trained(self, step: int) -> Mapping[str, float]:
        """Has no metrics: a trained step leaves no state."""
        return {}

    def finished(self) -> bool:
        """Whether steps or epochs are used up."""
        cfg, state, data = self._run.config.grpo, self._run.state, self._run.config.data
        if state.step >= cfg.max_num_steps:
            return True
        if data.use_multiple_dataloader or cfg.use_dynamic_sampling:
            return not data.use_multiple_dataloader and state.epoch >= cfg.max_num_epochs
        loader, in_last_epoch = self._run.train_loader, state.epoch == cfg.max_num_epochs - 1
        return state.epoch >= cfg.max_num_epochs or (
            in_last_epoch and isinstance(loader, Sized) and state.step_in_epoch >= len(loader)
        )

    def waited_for(self) -> tuple[int, int]:
        """A whole batch, none of it finished."""
        return (0 if self.finished() else self._run.config.grpo.num_prompts_per_step), 0

    def recompute_kv(self) -> bool:
        """True: cached prefixes belong to the old weights."""
        return True

    def refit_window(self) -> AbstractContextManager[None]:
        """No rollout runs between steps."""
        return nullcontext()

    def position(self) -> tuple[HasState, Mapping[str, object]]:
        """The loader position, before any prefetched batch."""
        return self._prompts.position(), {}

    def stop(self) -> None:
        """Does nothing: no rollout runs between steps."""

    def clear(self) -> None:
        """Does nothing: no group waits."""

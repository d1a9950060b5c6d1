"""Where a step's experience comes from, and the source that generates it on the spot.

A source says where the batch of the current step comes from, when there are no more, and what a checkpoint must hold of
it; the step loop (`loop`) does the rest. `async_source` generates ahead. Invariant: every drawn prompt group is trained
once, or recorded as dropped, or held by the checkpoint.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sized
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

from nemo_rl.algorithms.grpo.collect import collect_experience
from nemo_rl.algorithms.grpo.stages import Experience
from nemo_rl.data.loader import HasState
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.prompts import EpochPrompts

if TYPE_CHECKING:
    from nemo_rl.algorithms.grpo.run import GRPORun
    from nemo_rl.experience.stream_collector import StreamCollector
    from nemo_rl.experience.trajectory_collector import TrajectoryCollector


class ExperienceSource(Protocol):
    """Gives the step loop its experience.

    Attributes:
        generates_ahead: Whether rollouts of later steps run while a step trains.
        in_parts: Whether a step comes in parts; otherwise it is one.
    """

    generates_ahead: bool
    in_parts: bool

    @property
    def collector(self) -> TrajectoryCollector | StreamCollector | None:
        """What rolls out ahead; None where nothing does."""
        ...

    @property
    def version(self) -> int:
        """The version of the run's weights."""
        ...

    def start(self) -> None:
        """Takes up what the checkpoint held; nothing generates yet."""
        ...

    def published(self, version: int) -> None:
        """Generation serves `version`: rollouts may begin."""
        ...

    def parts(self) -> Generator[Experience]:
        """The experience of the current step, scored and filtered; nothing where the prompts are used up.

        Raises:
            GenerationError, EnvironmentFailure, CollectorError, DynamicSamplingError: It cannot be made.
        """
        ...

    def metrics(self) -> Mapping[str, float]:
        """The source's own figures of the step whose parts were given, for the prefix `train`."""
        ...

    def draw_ahead(self) -> None:
        """Gets the prompts ready that are wanted after the current step, while it trains. Does not fail: whoever draws
        them does.
        """
        ...

    def trained(self, step: int) -> None:
        """Step `step` is trained."""
        ...

    def finished(self) -> bool:
        """Whether steps or epochs are used up."""
        ...

    def waited_for(self) -> tuple[int, int]:
        """Prompt groups that the current step needs, and how many of them are there."""
        ...

    def recompute_kv(self) -> bool:
        """Whether requests that run while generation takes new weights compute their keys and values anew."""
        ...

    def refit_window(self) -> AbstractContextManager[None]:
        """The span in which generation takes new weights."""
        ...

    def loader(self) -> HasState:
        """Where the loader stands, for a checkpoint."""
        ...

    def saved(self) -> Mapping[str, object]:
        """Further files of a checkpoint by name."""
        ...

    def stop(self) -> None:
        """Ends what generates. Safe to call twice."""
        ...

    def clear(self) -> None:
        """Forgets what nobody will train."""
        ...


def prompts_of(run: GRPORun) -> EpochPrompts:
    """The run's prompts, batch by batch across epochs."""
    cfg = run.config.grpo
    return EpochPrompts(
        run.train_loader,
        batch_size=int(cfg.num_prompts_per_step * cfg.batch_multiplier),
        epoch=run.state.epoch,
        max_epochs=cfg.max_num_epochs,
    )


class WholeSteps:
    """What sources have in common that give a step in one piece."""

    in_parts = False

    def next_experience(self) -> Experience:
        """The scored and filtered experience of the current step.

        Raises:
            StopIteration: The prompts are used up.
        """
        raise NotImplementedError

    def parts(self) -> Generator[Experience]:
        """One part."""
        try:
            whole = self.next_experience()
        except StopIteration:
            return
        yield whole

    def metrics(self) -> Mapping[str, float]:
        """None."""
        return {}


class SynchronousSource(WholeSteps):
    """Generates the batch of a step when the step wants it, with the weights of that moment."""

    generates_ahead = False

    def __init__(self, run: GRPORun) -> None:
        self._run = run
        self._prompts = prompts_of(run)

    @property
    def collector(self) -> None:
        """None: rollouts and training take turns."""

    @property
    def version(self) -> int:
        """The version of the run's weights."""
        return self._run.state.step

    def start(self) -> None:
        """The loader stands where the checkpoint left it already."""

    def published(self, version: int) -> None:
        """Generation waits for the step."""

    def next_experience(self) -> Experience:
        """Brings generation to the current weights and rolls out."""
        run = self._run
        run.progress.phase("generation")
        with run.timer.time("prepare_for_generation/total"):
            run.control.serve(run.state.step)
        with run.control.demand(run.state.step, *self.waited_for()):
            return collect_experience(run, self._next_prompts)

    def _next_prompts(self) -> BatchedDataDict:
        state = self._run.state
        try:
            return self._prompts.next()
        finally:
            if self._prompts.epoch != state.epoch:
                state.epoch, state.step_in_epoch = self._prompts.epoch, 0

    def draw_ahead(self) -> None:
        """Fetches the next batch."""
        if not self.finished():
            self._prompts.prefetch()

    def trained(self, step: int) -> None:
        """A trained step leaves no state."""

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
        """A whole batch, none of it made yet."""
        return (0 if self.finished() else self._run.config.grpo.num_prompts_per_step), 0

    def recompute_kv(self) -> bool:
        """Cached prefixes are of the old weights too."""
        return True

    def refit_window(self) -> AbstractContextManager[None]:
        """No rollout runs between steps."""
        return nullcontext()

    def loader(self) -> HasState:
        """Where the run's own stands, or stood before it was asked ahead."""
        return self._prompts.position()

    def saved(self) -> Mapping[str, object]:
        """The loader is all there is."""
        return {}

    def stop(self) -> None:
        """No rollout runs between steps."""

    def clear(self) -> None:
        """No group waits."""

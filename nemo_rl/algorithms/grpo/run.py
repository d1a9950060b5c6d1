"""A GRPO run as one object, the counters that its checkpoints carry, and what supplies its steps with experience.

A source says where the experience of the current step comes from, when there is no more, and what a checkpoint must
hold of it. Invariant: every drawn prompt group is trained once, or recorded as dropped, or held by the checkpoint.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from nemo_rl.algorithms.distillation.teachers import Teachers
from nemo_rl.algorithms.grpo.stages import Experience
from nemo_rl.algorithms.grpo.step_reports import StepReports
from nemo_rl.algorithms.resume import RunState
from nemo_rl.algorithms.training_loop import TrainingRun
from nemo_rl.config import MasterConfig
from nemo_rl.data.loader import HasState, Loader
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.environments.environment_registry import Actors
from nemo_rl.experience.collector import Collector
from nemo_rl.experience.rollout_source import RolloutSource
from nemo_rl.experience.rollouts import RolloutWatch
from nemo_rl.experience.store import ExperienceStore
from nemo_rl.models.generation.endpoint.server import Endpoint

if TYPE_CHECKING:
    from nemo_rl.utils.checkpoint import TrainingInfo


class GRPOState(RunState):
    """Counters under the names that GRPO checkpoints use."""

    def training_info(self) -> dict[str, object]:
        """The fields of `training_info.json`."""
        reward = {"val_reward": self.val_metrics["accuracy"]} if "accuracy" in self.val_metrics else {}
        return self.totals() | {
            "current_step": self.step_in_epoch,
            "current_epoch": self.epoch,
            "val_metrics": self.val_metrics,
            **reward,
        }

    @classmethod
    def from_training_info(cls, info: TrainingInfo) -> GRPOState:
        """Counters from a checkpoint."""
        return cls.resumed(
            info,
            epoch=info["current_epoch"],
            step_in_epoch=info["current_step"],
            val_metrics=info.get("val_metrics", {}),
        )


class ExperienceSource(Protocol):
    """Supplies the step loop with experience."""

    @property
    def collector(self) -> Collector | None:
        """What generates rollouts of later steps while a step trains; None: generation and training take turns."""
        ...

    def running(self) -> AbstractContextManager[object]:
        """Context manager around all steps. Restores what the checkpoint held, without starting generation; stops
        generation at the end, and then drops rollouts that will not be trained.
        """
        ...

    def published(self, version: int) -> None:
        """Called when generation serves `version`, so that its rollouts may begin."""
        ...

    def parts(self) -> Generator[Experience]:
        """Yields the current step's experience, scored and filtered; yields nothing if the prompts are used up. Raises
        GenerationError, EnvironmentFailure, CollectorError, DynamicSamplingError: it cannot be made.
        """
        ...

    def draw_ahead(self) -> None:
        """Prefetches the next step's prompts while this one trains. Errors are raised by the next draw."""
        ...

    def trained(self) -> Mapping[str, float]:
        """Called once the current step is trained; returns the source's metrics of it, for the prefix `train`."""
        ...

    def finished(self) -> bool:
        """Whether steps or epochs are used up."""
        ...

    def waited_for(self) -> tuple[int, int]:
        """Number of prompt groups that the current step needs, and how many of them are finished."""
        ...

    def position(self) -> tuple[HasState, Mapping[str, object]]:
        """The loader position for a checkpoint, and the source's own files of it by name."""
        ...


@dataclass
class ValidationParts:
    """What validation generates and judges with."""

    rollouts: RolloutSource
    environments: Actors
    env_of_task: dict[str, str]  # environment name per task
    watch: RolloutWatch = field(default_factory=RolloutWatch)  # warns about cut samples


@dataclass(kw_only=True)
class GRPORun(TrainingRun[MasterConfig]):
    """A GRPO run. Its `generation` is None when rollouts are replayed and nothing validates."""

    rollouts: RolloutSource  # supplies its source with samples to train on
    validation: ValidationParts | None  # None if there is no validation data
    store: ExperienceStore
    train_loader: Loader  # its source draws from it
    total_steps: int  # last step of the run, as far as it can be known at the start
    clusters: list[RayVirtualCluster]
    reports: StepReports  # writes step reports in the background
    teachers: Teachers | None = None  # score the run's samples, or None
    endpoint: Endpoint | None = None  # serves the engines over HTTP, or None
    adapter: str = ""  # the adapter that it trains, of several on one base; empty for a run of its own
    resumed_from: Path | None = None  # checkpoint whose prompt groups wait to be trained
    source: ExperienceSource = field(init=False)  # supplies the steps with experience

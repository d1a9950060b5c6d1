"""Where a step's experience comes from: in turns with training, ahead of it, or in parts as prompt groups finish.

A source says where the experience of the current step comes from, when there is no more, and what a checkpoint must
hold of it. Invariant: every drawn prompt group is trained once, or recorded as dropped, or held by the checkpoint.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from nemo_rl.algorithms.grpo.stages import Experience
from nemo_rl.data.loader import HasState

if TYPE_CHECKING:
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

"""Where a step's experience comes from: in turns with training, ahead of it, or in parts as prompt groups finish.

A source says where the experience of the current step comes from, when there is no more, and what a checkpoint must
hold of it. Invariant: every drawn prompt group is trained once, or recorded as dropped, or held by the checkpoint.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from nemo_rl.algorithms.grpo.stages import Experience
from nemo_rl.data.loader import HasState
from nemo_rl.experience.collector import Collector


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


class WholeSteps:
    """Base of sources that yield each step as one part."""

    def next_experience(self) -> Experience:
        """The scored and filtered experience of the current step. Raises StopIteration: the prompts are used up."""
        raise NotImplementedError

    def parts(self) -> Generator[Experience]:
        """Yields the whole step."""
        try:
            whole = self.next_experience()
        except StopIteration:
            return
        yield whole

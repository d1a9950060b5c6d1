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
    from nemo_rl.experience.collector import Collector


class ExperienceSource(Protocol):
    """Supplies the step loop with experience."""

    generates_ahead: bool  # whether rollouts of later steps run while a step trains
    in_parts: bool  # whether `parts` may yield several parts per step

    @property
    def collector(self) -> Collector | None:
        """The collector that generates ahead, or None."""
        ...

    def start(self) -> None:
        """Restores what the checkpoint held. Generation has not started yet."""
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

    def trained(self, step: int) -> Mapping[str, float]:
        """Called once step `step` is trained; returns the source's metrics of it, for the prefix `train`."""
        ...

    def finished(self) -> bool:
        """Whether steps or epochs are used up."""
        ...

    def waited_for(self) -> tuple[int, int]:
        """Number of prompt groups that the current step needs, and how many of them are finished."""
        ...

    def recompute_kv(self) -> bool:
        """Whether requests that run during a refit recompute their KV cache."""
        ...

    def refit_window(self) -> AbstractContextManager[None]:
        """Context manager around a refit."""
        ...

    def position(self) -> tuple[HasState, Mapping[str, object]]:
        """The loader position for a checkpoint, and the source's own files of it by name."""
        ...

    def stop(self) -> None:
        """Stops generation. Safe to call twice."""
        ...

    def clear(self) -> None:
        """Drops rollouts that will not be trained."""
        ...


class WholeSteps:
    """Base of sources that yield each step as one part."""

    in_parts = False

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

"""When a run may use its accelerators.

Steps call `Accelerators` at fixed points. A run keeps those that it reserved for itself (`KeptAccelerators`); a
scheduler lends and takes back those of a pool (`nemo_rl.time_sharing.pipelines`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

ReportProgress = Callable[[int, int], None]
"""Takes the prompt groups that are there and those that are waited for."""

DemandKind = Literal["training", "validation"]


class Accelerators(Protocol):
    """Decides who uses a run's accelerators."""

    def demand(
        self, step: int, groups: int, ready: int, kind: DemandKind = "training"
    ) -> AbstractContextManager[ReportProgress]:
        """Context manager around the wait for `groups` prompt groups, of which `ready` are finished. Yields a callback
        that reports progress.
        """
        ...

    def lend_training(self, step: int) -> None:
        """Blocks until the training accelerators may be used for step `step`."""
        ...

    def yield_training(self, step: int) -> None:
        """The run does without the training accelerators until the next `lend_training`; their lender may take them.
        The gradients of an open step are kept.
        """
        ...

    def stop(self) -> None:
        """Called once when the run ends, also after an error."""
        ...


class KeptAccelerators:
    """Accelerators that the run may use at any time."""

    def demand(
        self, step: int, groups: int, ready: int, kind: DemandKind = "training"
    ) -> AbstractContextManager[ReportProgress]:
        """Reports to no one."""
        return nullcontext(lambda ready, of: None)

    def lend_training(self, step: int) -> None:
        """Returns at once."""

    def yield_training(self, step: int) -> None:
        """Does nothing: the run keeps its accelerators."""

    def stop(self) -> None:
        """Does nothing."""

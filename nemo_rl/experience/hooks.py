"""The hooks by which a control plane lends accelerators to a run and takes them back.

The default does nothing. Order in a run: `on_trajectory_collector_created` once, then per step `begin_progress_batch`,
`report_progress` while samples arrive, `end_progress_batch`, `before_training`, `before_weight_sync`, `after_training`.
"""

from __future__ import annotations

import os
from typing import Protocol

from nemo_rl.config.errors import UserError

CONTROL_PLANE_VARIABLE = "RLIX_CONTROL_PLANE"


class HooksError(UserError, RuntimeError):
    """A control plane's hooks did not do their part of the step."""


def time_sharing_enabled() -> bool:
    """Whether a control plane owns the accelerators (`RLIX_CONTROL_PLANE=rlix`), and with them refits, sleep and Ray's
    end.
    """
    return os.environ.get(CONTROL_PLANE_VARIABLE, "") == "rlix"


class RLixHooksProtocol(Protocol):
    """Hooks of a control plane in the step loop; by default each does nothing."""

    def on_trajectory_collector_created(self, collector: object) -> None:
        """The collector exists and waits for its first version; generation may be asked for from here on.

        Under a control plane generation serves the run's version when this returns.
        """
        return

    def begin_progress_batch(self, step: int, target: int, completed: int) -> None:
        """The driver begins to wait for step `step`: `completed` of `target` prompt groups are there already."""
        return

    def report_progress(self, step_target_trajectories: int, completed: int, new_batch: bool) -> None:
        """More of the groups that the driver waits for are there; called when another fiftieth of them is."""
        return

    def end_progress_batch(self) -> None:
        """The wait is over, however it ended."""
        return

    def clear_progress(self) -> None:
        """The run waits for nothing any more."""
        return

    def before_training(self, step: int) -> None:
        """Returns once the training accelerators may be used for step `step`; or, where validation has just ended the
        run, for its last checkpoint.
        """
        return

    def before_weight_sync(self, step: int) -> None:
        """Step `step` is trained and its weights are resident: the moment to pack them."""
        return

    def after_training(self, step: int) -> int | None:
        """Brings generation to the weights of step `step` and gives the training accelerators back. Returns the version
        that generation serves now, which is `step + 1`; None leaves the refit to the driver, and is an error under a
        control plane.
        """
        return None


class NoOpRLixHooks(RLixHooksProtocol):
    """No control plane: does nothing, and leaves refits to the driver."""

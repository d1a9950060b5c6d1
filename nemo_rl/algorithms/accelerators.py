"""When a run may use its accelerators, and when its generation takes new weights.

The step loop calls `Accelerators` at fixed points. `OwnAccelerators` are a run's own, and call the hooks of a foreign
control plane there; `nemo_rl.time_sharing` has those that a scheduler lends. Invariant: after `serve(v)` or
`publish(v - 1)` generation serves exactly version v.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Literal

from nemo_rl.config import ConfigError, MasterConfig
from nemo_rl.experience.hooks import (
    CONTROL_PLANE_VARIABLE,
    HooksError,
    NoOpRLixHooks,
    RLixHooksProtocol,
    time_sharing_enabled,
)
from nemo_rl.utils.progress import fiftieth
from nemo_rl.utils.timer import Timer

if TYPE_CHECKING:
    from nemo_rl.algorithms.grpo.refitter import Refitter
    from nemo_rl.experience.collector import Collector

ReportProgress = Callable[[int, int], None]
"""Takes the prompt groups that are there and those that are waited for."""

DemandKind = Literal["training", "validation"]


class Accelerators:
    """Who uses a run's accelerators, and when. The base lets the run use them at any time.

    Attributes:
        saves_before_publish: Whether a due checkpoint must be taken before `publish`, because the run loses its
            training accelerators there.
    """

    @property
    def saves_before_publish(self) -> bool:
        """See the class."""
        return False

    def start(self, collector: Collector | None, version: int) -> None:
        """Prepares for rollouts. With a collector, which generates ahead of training, generation serves `version` on
        return.
        """

    def serve(self, version: int) -> None:
        """Makes generation serve `version`. Called before the rollouts of a step and before validation."""

    def demand(
        self, step: int, groups: int, ready: int, kind: DemandKind = "training"
    ) -> AbstractContextManager[ReportProgress]:
        """Context manager around the wait for `groups` prompt groups, of which `ready` are finished. Yields a callback
        that reports progress.
        """
        return nullcontext(lambda ready, of: None)

    def lend_training(self, step: int) -> None:
        """Blocks until the training accelerators may be used for step `step`."""

    def yield_training(self, step: int) -> None:
        """The run does without the training accelerators until the next `lend_training`; their lender may take them.
        The gradients of an open step are kept.
        """

    def lend_saving(self, step: int) -> None:
        """Makes room for the policy's state on the training accelerators, to save a checkpoint of step `step`."""

    def weights_ready(self, step: int) -> None:
        """Called once step `step` is trained, while its weights are still on the devices."""

    def publish(self, step: int, waited_for: Callable[[], tuple[int, int]]) -> None:
        """Called once step `step` is complete and no longer needs the training accelerators. If generation runs ahead,
        it serves version `step + 1` on return. `waited_for`: prompt groups of the next step, and those finished.
        """

    def stop(self) -> None:
        """Called once when the run ends, also after an error."""

    def metrics(self) -> Mapping[str, float]:
        """Metrics of the last refit, for the prefix `refit`."""
        return {}


def check_control_plane(config: MasterConfig) -> None:
    """Checks that an external control plane can identify each engine by its GPU. Raises ConfigError: several engines
    share each GPU.
    """
    engines = config.policy.generation.vllm_cfg.engines_per_gpu
    if engines > 1 and time_sharing_enabled():
        raise ConfigError(
            [
                f"policy.generation.vllm_cfg.engines_per_gpu is {engines}, but {CONTROL_PLANE_VARIABLE} is set, and a "
                "control plane lends GPUs to one engine each; set it to 1, or unset the variable"
            ]
        )


class OwnAccelerators(Accelerators):
    """Accelerators of a run that has its own: refits generation whenever its weights are old.

    Args:
        refitter: Sends the policy's weights to generation; None without a policy or without generation.
        timer: Records the times of refits.
        phase: Callback that shows what the run is doing.
    """

    def __init__(self, refitter: Refitter | None, timer: Timer, phase: Callable[[str], None]) -> None:
        self._refitter, self._timer, self._phase = refitter, timer, phase
        self._hooks: RLixHooksProtocol = NoOpRLixHooks()
        self._hooks_refit = self._holds = False
        self._collector: Collector | None = None

    def call_hooks(self, hooks: RLixHooksProtocol, *, they_refit: bool) -> None:
        """Calls a foreign control plane at the points that `RLixHooksProtocol` names. `they_refit`: whether it owns the
        accelerators, so that the run neither refits generation nor puts it to sleep.
        """
        self._hooks, self._hooks_refit = hooks, they_refit

    @property
    def saves_before_publish(self) -> bool:
        """Whether hooks take the training accelerators back at `publish`."""
        return self._hooks_refit

    @property
    def _own(self) -> Refitter | None:
        """What refits generation, if the run does that itself."""
        return None if self._hooks_refit else self._refitter

    def start(self, collector: Collector | None, version: int) -> None:
        """Passes the collector to the hooks, and sends the first weights if generation runs ahead. From here on it
        waits for failed shards to be rebuilt.
        """
        self._hooks.on_trajectory_collector_created(collector)
        self._collector = collector
        self._refit(version)
        self._await_rebuild(collector is not None)

    def serve(self, version: int) -> None:
        """Refits unless generation has that version."""
        if self._own is not None:
            self._own.bring_to(version, self._timer)

    @contextmanager
    def demand(self, step: int, groups: int, ready: int, kind: DemandKind = "training") -> Generator[ReportProgress]:
        """Rebuilds the engines if all have failed while waiting for rollouts ahead of training: each progress report
        checks for that. Validation does not report progress, so its requests fail instead of waiting. Hooks hear of the
        wait before it begins, and know no validation.
        """
        if kind == "validation":
            self._await_rebuild(False)
            try:
                yield lambda ready, of: None
            finally:
                self._await_rebuild(self._collector is not None)
            return
        reported = -1

        def report(ready: int, of: int) -> None:
            nonlocal reported
            if self._own is not None and self._collector is not None:
                self._own.revive(step)
            share = fiftieth(ready, of)
            if share != reported:
                self._hooks.report_progress(of, ready, reported < 0)
                reported = share

        self._hooks.begin_progress_batch(step, groups, ready)
        try:
            yield report
        finally:
            self._hooks.end_progress_batch()

    def _await_rebuild(self, rebuilds: bool) -> None:
        if self._own is not None:
            self._own.await_rebuild(rebuilds)

    def lend_training(self, step: int) -> None:
        """Blocks until the hooks return, and puts generation to sleep if it shares its devices with training."""
        self._hooks.before_training(step)
        self._holds = True
        if self._own is not None:
            self._own.release_device()

    def lend_saving(self, step: int) -> None:
        """Puts generation to sleep if validation woke it and moved training state to the host. Asks hooks for the
        accelerators again if they took them back; the last step of a run needs that.
        """
        if self._own is not None:
            self._own.make_room()
        elif self._hooks_refit and not self._holds:
            self.lend_training(step)

    def weights_ready(self, step: int) -> None:
        """Lets hooks pack the weights; the run's own refits read them from the devices."""
        self._hooks.before_weight_sync(step)

    def publish(self, step: int, waited_for: Callable[[], tuple[int, int]]) -> None:
        """Lets hooks publish the new version. If they leave it to the run, refits generation that runs ahead;
        otherwise the next `serve` refits. Raises HooksError: the hooks own the accelerators and did not bring
        generation to the new weights.
        """
        published = self._hooks.after_training(step)
        self._holds = False
        if published is None and self._hooks_refit:
            raise HooksError(
                f"{CONTROL_PLANE_VARIABLE} is set, so hooks refit: after_training must bring generation to version "
                f"{step + 1} and return it"
            )
        if published is None:
            self._refit(step + 1)
        elif published != step + 1:
            raise HooksError(
                f"after_training({step}) published version {published}; the weights of {step + 1} completed steps are "
                "that version"
            )

    def _refit(self, version: int) -> None:
        collector = self._collector
        if collector is None or self._own is None:
            return
        self._phase("refit")
        # Requests that wait for a failed shard would block the refit window.
        self._own.revive(version)
        with self._timer.time("weight_sync"), collector.tasks.refit_window(self._timer):
            self._own.bring_to(version, self._timer, recompute_kv=collector.tasks.refits.recompute_kv)

    def stop(self) -> None:
        """Tells hooks that the run waits for no more rollouts; stops rebuilding failed shards."""
        self._hooks.clear_progress()
        if self._refitter is not None:
            self._refitter.close()

    def metrics(self) -> Mapping[str, float]:
        return self._own.metrics() if self._own is not None else {}

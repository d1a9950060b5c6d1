"""Control planes: they decide when generation takes new weights and when training may use its devices.

The step loop calls a control plane at fixed points. `OwnAccelerators` is for a run with devices of its own,
`HookedControlPlane` calls a foreign control plane through `RLixHooksProtocol`, and `nemo_rl.time_sharing` has the
scheduler's. Invariant: after `serve(v)` or `publish(v - 1)` generation serves exactly version v.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Literal, Protocol

from nemo_rl.config import ConfigError, MasterConfig
from nemo_rl.experience.hooks import CONTROL_PLANE_VARIABLE, HooksError, RLixHooksProtocol, time_sharing_enabled
from nemo_rl.utils.timer import Timer

if TYPE_CHECKING:
    from nemo_rl.algorithms.grpo.experience_source import ExperienceSource
    from nemo_rl.algorithms.grpo.refit import Refitter

ReportProgress = Callable[[int, int], None]
"""Takes the prompt groups that are there and those that are waited for."""

DemandKind = Literal["training", "validation"]

_FIFTIETHS = 50


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


class ControlPlane(Protocol):
    """Decides who uses a run's accelerators. `saves_before_publish`: whether a due checkpoint must be taken before
    `publish`, because the run loses its training accelerators there.
    """

    saves_before_publish: bool

    def start(self, source: ExperienceSource, version: int) -> None:
        """Prepares for rollouts. If the source generates ahead, generation serves `version` on return."""
        ...

    def serve(self, version: int) -> None:
        """Makes generation serve `version`. Called before the rollouts of a step and before validation."""
        ...

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
        """Releases the training accelerators while the open step waits for its own rollouts, until the next
        `lend_training`. The step's gradients are kept.
        """
        ...

    def lend_saving(self, step: int) -> None:
        """Makes room for the policy's state on the training accelerators, to save a checkpoint of step `step`."""
        ...

    def weights_ready(self, step: int) -> None:
        """Called once step `step` is trained, while its weights are still on the devices."""
        ...

    def publish(self, step: int, source: ExperienceSource) -> None:
        """Called once step `step` is complete and no longer needs the training accelerators. If generation runs ahead,
        it serves version `step + 1` on return.
        """
        ...

    def stop(self) -> None:
        """Called once when the run ends, also after an error."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Metrics of the last refit, for the prefix `refit`."""
        ...


class OwnAccelerators:
    """For a run with devices of its own: refits generation whenever its weights are old.

    Args:
        refitter: Sends the policy's weights to generation; None for replayed rollouts without validation.
        timer: Records the times of refits.
        phase: Callback that shows what the run is doing.
    """

    saves_before_publish = False

    def __init__(self, refitter: Refitter | None, timer: Timer, phase: Callable[[str], None]) -> None:
        self._refitter, self._timer, self._phase = refitter, timer, phase
        self._ahead = False

    def start(self, source: ExperienceSource, version: int) -> None:
        """Sends the first weights if generation runs ahead. From here on it waits for failed shards to be rebuilt."""
        self._ahead = source.generates_ahead
        self._refit(source, version)
        self._await_rebuild(self._ahead)

    def serve(self, version: int) -> None:
        """Refits unless generation has that version."""
        if self._refitter is not None:
            self._refitter.bring_to(version, self._timer)

    def demand(
        self, step: int, groups: int, ready: int, kind: DemandKind = "training"
    ) -> AbstractContextManager[ReportProgress]:
        """Rebuilds the engines if all have failed while waiting for rollouts ahead of training: each progress report
        checks for that. Validation does not report progress, so its requests fail instead of waiting.
        """
        refitter = self._refitter
        if refitter is None or not self._ahead:
            return nullcontext(lambda ready, of: None)
        if kind == "validation":
            return self._without_rebuild()
        return nullcontext(lambda ready, of: refitter.revive(step))

    @contextmanager
    def _without_rebuild(self) -> Generator[ReportProgress]:
        self._await_rebuild(False)
        try:
            yield lambda ready, of: None
        finally:
            self._await_rebuild(True)

    def _await_rebuild(self, rebuilds: bool) -> None:
        if self._refitter is not None:
            self._refitter.await_rebuild(rebuilds)

    def lend_training(self, step: int) -> None:
        """Puts generation to sleep if it shares its devices with training."""
        if self._refitter is not None:
            self._refitter.release_device()

    def yield_training(self, step: int) -> None:
        """Does nothing: the run keeps its accelerators, and generation has others."""

    def lend_saving(self, step: int) -> None:
        """Puts generation to sleep if validation woke it and moved training state to the host."""
        if self._refitter is not None:
            self._refitter.make_room()

    def weights_ready(self, step: int) -> None:
        """Does nothing: refits read the weights from the devices."""

    def publish(self, step: int, source: ExperienceSource) -> None:
        """Refits generation that runs ahead. Otherwise the next `serve` refits."""
        self._refit(source, step + 1)

    def _refit(self, source: ExperienceSource, version: int) -> None:
        if not source.generates_ahead or self._refitter is None:
            return
        self._phase("refit")
        # Requests that wait for a failed shard would block the refit window.
        self._refitter.revive(version)
        with self._timer.time("weight_sync"), source.refit_window():
            self._refitter.bring_to(version, self._timer, recompute_kv=source.recompute_kv())

    def stop(self) -> None:
        """Stops rebuilding failed shards."""
        if self._refitter is not None:
            self._refitter.close()

    def metrics(self) -> Mapping[str, float]:
        return self._refitter.metrics() if self._refitter is not None else {}


class HookedControlPlane:
    """Calls a foreign control plane through hooks. `hooks`: called at the points that `RLixHooksProtocol` names. `own`:
    does what the hooks leave to the run; None if the foreign plane owns the accelerators and must refit.
    """

    def __init__(self, hooks: RLixHooksProtocol, own: OwnAccelerators | None) -> None:
        self._hooks, self._own = hooks, own
        self.saves_before_publish = own is None
        self._holds = False

    def start(self, source: ExperienceSource, version: int) -> None:
        """Passes the collector to the hooks. If they own the accelerators, they have refitted on return."""
        self._hooks.on_trajectory_collector_created(source.collector)
        if self._own is not None:
            self._own.start(source, version)

    def serve(self, version: int) -> None:
        """Refits only if the run owns its accelerators."""
        if self._own is not None:
            self._own.serve(version)

    @contextmanager
    def demand(self, step: int, groups: int, ready: int, kind: DemandKind = "training") -> Generator[ReportProgress]:
        """Progress begins before the wait: it tells the lender of accelerators about the demand. The hooks know no
        validation.
        """
        unreported = nullcontext[ReportProgress](lambda ready, of: None)
        with self._own.demand(step, groups, ready, kind) if self._own is not None else unreported as own:
            if kind == "validation":
                yield own
            else:
                with self._progress(step, groups, ready, own) as report:
                    yield report

    @contextmanager
    def _progress(self, step: int, groups: int, ready: int, own: ReportProgress) -> Generator[ReportProgress]:
        reported = -1

        def report(ready: int, of: int) -> None:
            nonlocal reported
            own(ready, of)
            share = _FIFTIETHS * ready // max(1, of)
            if share != reported:
                self._hooks.report_progress(of, ready, reported < 0)
                reported = share

        self._hooks.begin_progress_batch(step, groups, ready)
        try:
            yield report
        finally:
            self._hooks.end_progress_batch()

    def lend_training(self, step: int) -> None:
        """Blocks until the hooks return."""
        self._hooks.before_training(step)
        self._holds = True
        if self._own is not None:
            self._own.lend_training(step)

    def yield_training(self, step: int) -> None:
        """Does nothing: the hooks lend the accelerators for a whole step."""

    def lend_saving(self, step: int) -> None:
        """Asks the hooks for the accelerators again if they took them back; the last step of a run needs that."""
        if self._own is not None:
            self._own.lend_saving(step)
        elif not self._holds:
            self.lend_training(step)

    def weights_ready(self, step: int) -> None:
        """Lets the hooks pack the weights."""
        self._hooks.before_weight_sync(step)

    def publish(self, step: int, source: ExperienceSource) -> None:
        """Lets the hooks publish the new version, or refits if they leave it to the run. Raises HooksError: the hooks
        own the accelerators and did not bring generation to the new weights.
        """
        published = self._hooks.after_training(step)
        self._holds = False
        if published is None and self._own is not None:
            self._own.publish(step, source)
        elif published is None:
            raise HooksError(
                f"{CONTROL_PLANE_VARIABLE} is set, so hooks refit: after_training must bring generation to version "
                f"{step + 1} and return it"
            )
        elif published != step + 1:
            raise HooksError(
                f"after_training({step}) published version {published}; the weights of {step + 1} completed steps are "
                "that version"
            )

    def stop(self) -> None:
        """Tells the hooks that the run waits for no more rollouts."""
        self._hooks.clear_progress()

    def metrics(self) -> Mapping[str, float]:
        """Metrics of the run's own refits."""
        return self._own.metrics() if self._own is not None else {}

"""Who owns the accelerators of a run: when generation takes new weights, when training may use its devices, what is
saved before they are given back.

The step loop asks a control plane at fixed points and knows nothing of placement. `OwnAccelerators` is a run by itself;
`HookedControlPlane` lets a foreign control plane in through `RLixHooksProtocol`; the scheduler's own is in
`nemo_rl.time_sharing`. Invariant: after `serve(v)` or `publish(v - 1)` generation serves exactly version v.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
    """Whether a control plane, where one owns the accelerators, can tell the run's engines apart by their GPUs.

    Raises:
        ConfigError: Several engines share each GPU.
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
    """Owns what a run's accelerators do.

    Attributes:
        saves_before_publish: Whether a checkpoint that is due must be snapshot before `publish`, because the training
            accelerators are somebody else's afterwards.
    """

    saves_before_publish: bool

    def start(self, source: ExperienceSource) -> None:
        """The source is ready to generate; where it generates ahead, generation serves its version on return."""
        ...

    def serve(self, version: int) -> None:
        """Generation serves `version` on return; called before rollouts of the current step, and before validation."""
        ...

    def demand(
        self, step: int, groups: int, ready: int, kind: DemandKind = "training"
    ) -> AbstractContextManager[ReportProgress]:
        """The span in which `groups` prompt groups are waited for, `ready` of which are there; yields what reports
        more.
        """
        ...

    def lend_training(self, step: int) -> None:
        """The training accelerators may be used for step `step` on return."""
        ...

    def yield_training(self, step: int) -> None:
        """Step `step` is open and waits for its own rollouts: others may use the training accelerators until the next
        `lend_training`. Gradients of the step survive.
        """
        ...

    def lend_saving(self, step: int) -> None:
        """The policy's state has room on the training accelerators on return, for a checkpoint of step `step`."""
        ...

    def weights_ready(self, step: int) -> None:
        """Step `step` is trained and its weights are resident."""
        ...

    def publish(self, step: int, source: ExperienceSource) -> None:
        """Step `step` is complete: the training accelerators are not used any more, and generation that runs ahead
        serves version `step + 1` on return.
        """
        ...

    def stop(self) -> None:
        """The run waits for nothing any more; called once, however it ended."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Figures of the last refit, for the prefix `refit`."""
        ...


class OwnAccelerators:
    """A run by itself: it refits generation whenever that is behind, and nobody else wants its devices.

    Args:
        refitter: Brings generation to the policy's version; None where rollouts are replayed and nothing validates.
        timer: Takes the times of refits.
        phase: Told what the run is doing.
    """

    saves_before_publish = False

    def __init__(self, refitter: Refitter | None, timer: Timer, phase: Callable[[str], None]) -> None:
        self._refitter, self._timer, self._phase = refitter, timer, phase
        self._ahead = False

    def start(self, source: ExperienceSource) -> None:
        """Generation that runs ahead gets its first weights; it waits for lost shards from here on."""
        self._ahead = source.generates_ahead
        self._refit(source, source.version)
        self._await_rebuild(self._ahead)

    def serve(self, version: int) -> None:
        """Refits, unless generation has that version."""
        if self._refitter is not None:
            self._refitter.bring_to(version, self._timer)

    def demand(
        self, step: int, groups: int, ready: int, kind: DemandKind = "training"
    ) -> AbstractContextManager[ReportProgress]:
        """Whoever waits for rollouts ahead of training has lost shards built anew where none is left: each report looks
        for that. Validation does not report, so that its requests fail instead of waiting.
        """
        refitter = self._refitter
        if refitter is None or not self._ahead:
            return nullcontext(lambda ready, of: None)
        if kind == "validation":
            return self._without_rebuild()
        return nullcontext(lambda ready, of: refitter.revive(step))

    @contextmanager
    def _without_rebuild(self) -> Iterator[ReportProgress]:
        self._await_rebuild(False)
        try:
            yield lambda ready, of: None
        finally:
            self._await_rebuild(True)

    def _await_rebuild(self, rebuilds: bool) -> None:
        if self._refitter is not None:
            self._refitter.await_rebuild(rebuilds)

    def lend_training(self, step: int) -> None:
        """Generation that shares its slots with training goes to sleep."""
        if self._refitter is not None:
            self._refitter.release_device()

    def yield_training(self, step: int) -> None:
        """Nothing to do: the accelerators are the run's own, and generation has others."""

    def lend_saving(self, step: int) -> None:
        """Generation that validated since, and needed the room, goes to sleep."""
        if self._refitter is not None:
            self._refitter.make_room()

    def weights_ready(self, step: int) -> None:
        """They are sent from where they are."""

    def publish(self, step: int, source: ExperienceSource) -> None:
        """Generation that runs ahead is refit; other generation waits until it is needed."""
        self._refit(source, step + 1)

    def _refit(self, source: ExperienceSource, version: int) -> None:
        if not source.generates_ahead or self._refitter is None:
            return
        self._phase("refit")
        # Requests that wait for a shard would keep the window closed.
        self._refitter.revive(version)
        with self._timer.time("weight_sync"), source.refit_window():
            self._refitter.bring_to(version, self._timer, recompute_kv=source.recompute_kv())

    def stop(self) -> None:
        """No lost shard is built any more; the devices stay the run's."""
        if self._refitter is not None:
            self._refitter.close()

    def metrics(self) -> Mapping[str, float]:
        """See `Refitter.metrics`."""
        return self._refitter.metrics() if self._refitter is not None else {}


class HookedControlPlane:
    """A foreign control plane behind hooks.

    Args:
        hooks: Called at the points that `RLixHooksProtocol` names.
        own: Does what the hooks leave to the run; None where the foreign plane owns the accelerators and must refit.
    """

    def __init__(self, hooks: RLixHooksProtocol, own: OwnAccelerators | None) -> None:
        self._hooks, self._own = hooks, own
        self.saves_before_publish = own is None
        self._holds = False

    def start(self, source: ExperienceSource) -> None:
        """The hooks see the collector; where they own the accelerators they have refit when they return."""
        self._hooks.on_trajectory_collector_created(source.collector)
        if self._own is not None:
            self._own.start(source)

    def serve(self, version: int) -> None:
        """Generation is where the hooks left it."""
        if self._own is not None:
            self._own.serve(version)

    @contextmanager
    def demand(self, step: int, groups: int, ready: int, kind: DemandKind = "training") -> Iterator[ReportProgress]:
        """Progress begins before the wait: whoever lends accelerators hears of the demand by it. The hooks know no
        validation.
        """
        nobody = nullcontext[ReportProgress](lambda ready, of: None)
        with self._own.demand(step, groups, ready, kind) if self._own is not None else nobody as own:
            if kind == "validation":
                yield own
            else:
                with self._progress(step, groups, ready, own) as report:
                    yield report

    @contextmanager
    def _progress(self, step: int, groups: int, ready: int, own: ReportProgress) -> Iterator[ReportProgress]:
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
        """Returns when the hooks do."""
        self._hooks.before_training(step)
        self._holds = True
        if self._own is not None:
            self._own.lend_training(step)

    def yield_training(self, step: int) -> None:
        """Nothing to do: the hooks lend the accelerators for a whole step."""

    def lend_saving(self, step: int) -> None:
        """Accelerators that the hooks own, and got back, are asked for once more: a run's last step needs that."""
        if self._own is not None:
            self._own.lend_saving(step)
        elif not self._holds:
            self.lend_training(step)

    def weights_ready(self, step: int) -> None:
        """The hooks may pack the weights."""
        self._hooks.before_weight_sync(step)

    def publish(self, step: int, source: ExperienceSource) -> None:
        """The hooks publish the new version, or leave the refit to the run.

        Raises:
            HooksError: The hooks own the accelerators and did not bring generation to the new weights.
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
        """No demand is left."""
        self._hooks.clear_progress()

    def metrics(self) -> Mapping[str, float]:
        """Those of the run's own refits."""
        return self._own.metrics() if self._own is not None else {}

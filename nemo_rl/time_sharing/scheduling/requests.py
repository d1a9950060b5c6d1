"""Fixed requests of pipelines: takes them, drops withdrawn ones, and ends those that wait too long.

A pipeline numbers its requests with growing numbers and repeats the open ones in every status. Invariant: a request is
in the ledger once, until it is granted or dropped with a reason.
"""

from __future__ import annotations

from collections.abc import Callable

from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.log.ledger import PipelineState
from nemo_rl.time_sharing.log.state import EXPIRED, SchedulerState
from nemo_rl.time_sharing.protocol.types import EndedRequest, Phase, Status


class Requests:
    """The requests of all pipelines. `emit`: writes an event and applies it."""

    def __init__(self, state: SchedulerState, emit: Callable[[object], None]) -> None:
        self._state, self._emit = state, emit

    def take(self, pipeline: PipelineState, status: Status) -> None:
        """Queues a status's new requests and drops the withdrawn ones."""
        name = status.pipeline
        wanted = {want.cluster: want for want in status.wants}
        for cluster, queued in list(pipeline.wants.items()):
            if wanted.get(cluster) is None or wanted[cluster].request > queued.want.request:
                self._emit(ev.RequestDropped(name, cluster, queued.want.request, "withdrawn"))
                if (name, cluster, -1) in self._state.claims:
                    self._emit(ev.ClaimDropped(name, cluster, -1, "withdrawn"))
        for want in status.wants:
            if want.request <= pipeline.last_request or want.cluster not in pipeline.topology.clusters:
                continue
            # One that is drained may still finish the step for which it holds GPUs.
            if pipeline.leaving and not pipeline.held:
                continue
            self._emit(ev.Requested(name, want.cluster, want.priority, want.request, want.step))

    def expire(self, name: str, pipeline: PipelineState, now: float) -> None:
        """Drops the requests of a pipeline that have waited for `request_s`; not while it is paused."""
        if pipeline.paused:
            return
        for cluster, queued in list(pipeline.wants.items()):
            if now > queued.since + self._state.limits.request_s and (name, cluster, -1) not in self._state.claims:
                self._emit(ev.RequestDropped(name, cluster, queued.want.request, EXPIRED))

    def expired(self, pipeline: PipelineState, status: Status) -> tuple[EndedRequest, ...]:
        """Requests of a status that were dropped because they waited too long."""
        reason = f"it waited longer than request_s={self._state.limits.request_s:g}; ask again under a new number"
        return tuple(
            EndedRequest(want.request, reason)
            for want in status.wants
            if pipeline.expired.get(want.cluster) == want.request
        )

    def wait_for(self, name: str) -> bool:
        """Whether another pipeline waits for GPUs that this one holds: to train on them, or to generate at all."""
        held = {gpu for cluster in self._state.pipelines[name].held.values() for gpu in cluster.gpus}
        for other, pipeline in self._state.pipelines.items():
            if other == name or pipeline.fenced or pipeline.paused:
                continue
            asked = {gpu for cluster in pipeline.wants for gpu in pipeline.topology.clusters[cluster].gpus}
            unscheduled = pipeline.unscheduled_since is not None and not pipeline.held
            if held & (asked | (pipeline.topology.mapped_gpus if unscheduled else set())):
                return True
        return False

    def concern(self, event: ev.RankMoved) -> bool:
        """Whether the end of a hand-over calls for a plan at once: GPUs are free and unclaimed, or a pipeline waited
        for this rank to be up: the training of its own pipeline, or a pipeline without any rank that may get this one.
        """
        pipeline = self._state.pipelines[event.pipeline]
        gpus = pipeline.topology.ranks[event.rank]
        if event.phase is Phase.ASLEEP:
            return not all(gpu in self._state.claimed for gpu in gpus)
        unscheduled = (p for p in self._state.pipelines.values() if p.unscheduled_since is not None and not p.held)
        return bool(pipeline.wants) or any(not p.topology.mapped_gpus.isdisjoint(gpus) for p in unscheduled)

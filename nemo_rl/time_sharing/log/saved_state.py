"""The scheduler's whole state as one event. A segment of its log begins with it, so that nothing before the segment is
needed to go on.

It carries what cannot be derived; `state` folds it like every other event, into exactly the state that was saved.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields

from nemo_rl.time_sharing.log.ledger import (
    AwakeRank,
    Claim,
    HeldCluster,
    PendingCommand,
    PipelineState,
    Quarantine,
    QueuedWant,
)
from nemo_rl.time_sharing.protocol.topology import Topology
from nemo_rl.time_sharing.protocol.types import Demand, PipelineSpec, Priority
from nemo_rl.utils.record_events import event_kind


@dataclass(frozen=True, slots=True)
class SavedPipeline:
    """A `PipelineState`: its registration (`spec`) and its current state; fields have the meaning they have there."""

    spec: PipelineSpec
    incarnation: int
    registered_at: float
    demand: Demand
    wants: Mapping[str, QueuedWant]
    held: Mapping[str, HeldCluster]
    awake: Mapping[int, AwakeRank]
    warm: set[int]
    handover_s: float | None
    cooling: Mapping[int, float]
    releases: Mapping[str, int]
    hold_estimates: Mapping[Priority, float]
    unscheduled_since: float | None
    service: float
    last_request: int
    expired: Mapping[str, int]
    leaving: bool
    fenced: bool
    builds: bool = False
    build_s: float | None = None
    batch_since: float = 0.0
    generation_s: float | None = None
    start_s: float | None = None
    paused: bool = False

    @classmethod
    def of(cls, pipeline: PipelineState) -> SavedPipeline:
        return cls(pipeline.spec, **{name: copy.deepcopy(getattr(pipeline, name)) for name in _KEPT})

    def restored(self) -> PipelineState:
        """The pipeline, but for what follows from the others and from the claims."""
        return PipelineState(Topology(self.spec), **{name: copy.deepcopy(getattr(self, name)) for name in _KEPT})


_KEPT = tuple(member.name for member in fields(SavedPipeline) if member.name != "spec")


@event_kind("ts_state_saved")
class StateSaved:
    """The state after all events before this one; says nothing new."""

    nodes: int
    gpus_per_node: int
    limits: Mapping[str, float]
    term: int
    epoch: int
    plan: int
    recovering: bool
    pipelines: tuple[SavedPipeline, ...]
    incarnations: Mapping[str, int]
    claims: tuple[Claim, ...]
    quarantines: tuple[Quarantine, ...]
    commands: tuple[PendingCommand, ...]
    unsure: bool = False
    slots_per_gpu: int = 1

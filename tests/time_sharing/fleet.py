"""Small builders for tests of the scheduler's pure parts: states, pipelines, and plans carried out at once."""

from __future__ import annotations

from nemo_rl.time_sharing.log.events import (
    DemandReported,
    Granted,
    PoolOpened,
    RankMoved,
    Registered,
    Released,
    Requested,
)
from nemo_rl.time_sharing.log.state import SchedulerState
from nemo_rl.time_sharing.planning import planner
from nemo_rl.time_sharing.planning.plan import Plan, Snapshot
from nemo_rl.time_sharing.protocol.topology import register
from nemo_rl.time_sharing.protocol.types import ACTOR_INFER, ACTOR_TRAIN, Phase, Priority


class Fleet:
    """A scheduler state that tests fill by events, at times of their choosing."""

    def __init__(self, gpus: int, nodes: int = 1, **limits: float) -> None:
        self.state = SchedulerState()
        self.state.apply(PoolOpened(nodes, gpus // nodes, limits), 0.0)
        self.requests = 0
        self.epoch = 0

    def add(
        self,
        name: str,
        train: list[int],
        infer: list[int],
        *,
        tp: int = 1,
        weight: float = 1.0,
        demand: int = 0,
        at: float = 0.0,
        **options: float,
    ) -> None:
        mapping = {ACTOR_TRAIN: train, ACTOR_INFER: infer} if train else {ACTOR_INFER: infer}
        tps = {ACTOR_TRAIN: 1, ACTOR_INFER: tp} if train else {ACTOR_INFER: tp}
        spec = register(self.state.pool, name, "ns", tps, mapping, weight=weight, full_overlap=True, **options).spec  # type: ignore[arg-type]
        self.state.apply(Registered(name, 0, "ns", spec.clusters, **spec.options()), at)
        if demand:
            self.demand(name, demand, at=at)

    def release(self, name: str, cluster: str = ACTOR_TRAIN, *, at: float = 0.0) -> None:
        self.state.apply(Released(name, cluster, self.state.pipelines[name].held[cluster].epoch, 0), at)

    def demand(self, name: str, target: int, done: int = 0, *, at: float = 0.0, rank_batch: int = 0) -> None:
        seq = self.state.pipelines[name].demand.seq + 1
        self.state.apply(DemandReported(name, target, done, 1, seq, rank_batch), at)

    def want(self, name: str, priority: Priority = Priority.ACTOR_TRAINING, *, at: float = 0.0, step: int = 0) -> None:
        self.requests += 1
        self.state.apply(Requested(name, ACTOR_TRAIN, priority, self.requests, step), at)

    def hold(self, name: str, *, at: float = 0.0, priority: Priority = Priority.ACTOR_TRAINING) -> None:
        self.epoch += 1
        gpus = self.state.pipelines[name].topology.clusters[ACTOR_TRAIN].gpus
        self.state.apply(Granted(name, ACTOR_TRAIN, self.epoch, gpus, priority, 0, 0, at + 3600), at)

    def wake(
        self, name: str, *ranks: int, at: float = 0.0, phase: Phase = Phase.SERVING, guaranteed: bool = False
    ) -> None:
        for rank in ranks:
            self.epoch += 1
            self.state.apply(RankMoved(name, rank, Phase.RISING, self.epoch, guaranteed=guaranteed), at)
            if phase is not Phase.RISING:
                self.state.apply(RankMoved(name, rank, phase, self.epoch), at)

    def plan(self, now: float = 100.0) -> Plan:
        return planner.plan(Snapshot.of(self.state), now)

    def carry_out(self, plan: Plan, at: float) -> None:
        """Everything at once, as if hand-overs took no time."""
        for shrink in plan.shrinks:
            awake = self.state.pipelines[shrink.pipeline].awake[shrink.rank]
            self.state.apply(RankMoved(shrink.pipeline, shrink.rank, Phase.ASLEEP, awake.epoch), at)
        for grant in plan.grants:
            self.epoch += 1
            self.state.apply(
                Granted(
                    grant.pipeline, grant.cluster, self.epoch, grant.gpus, grant.priority, 0, grant.request, at + 3600
                ),
                at,
            )
        for expand in plan.expands:
            self.wake(expand.pipeline, expand.rank, at=at, guaranteed=expand.guaranteed)

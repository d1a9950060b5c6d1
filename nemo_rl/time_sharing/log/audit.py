"""Whether the scheduler's state agrees with itself: what it keeps for speed is worked out again from what it
rests on.
"""

from __future__ import annotations

from collections.abc import Iterator

from nemo_rl.time_sharing.log.ledger import Lease, PipelineState
from nemo_rl.time_sharing.log.state import SchedulerState
from nemo_rl.time_sharing.protocol.types import ACTOR_INFER, ACTOR_TRAIN, Phase

_UP = frozenset({Phase.WAKING, Phase.SYNCING, Phase.READY, Phase.ACTIVE})


def problems(state: SchedulerState) -> Iterator[str]:
    """Everything in the state that contradicts another part of it."""
    yield from _owners(state)
    yield from _claims(state)
    if state.quarantined != {gpu for quarantine in state.quarantines for gpu in quarantine.gpus}:
        yield f"GPUs {sorted(state.quarantined)} are withheld, in quarantine are {state.quarantines}"
    trainers = [0] * len(state.owner)
    for pipeline in state.pipelines.values():
        for gpu in _trained_on(pipeline):
            trainers[gpu] += 1
    if state.trainers != trainers:
        yield f"the numbers of pipelines that train on each GPU are {trainers}, kept is {state.trainers}"
    for name, pipeline in state.pipelines.items():
        if state.incarnations.get(name, -1) < pipeline.incarnation:
            yield f"{name} is registered as incarnation {pipeline.incarnation}, used are {state.incarnations.get(name)}"
        if pipeline.fenced and pipeline.wants:
            yield f"{name} is fenced and waits for {sorted(pipeline.wants)}"
        if _lacks_a_rank(pipeline) != (pipeline.unscheduled_since is not None):
            yield f"{name} is said to wait for a first rank since {pipeline.unscheduled_since}, which is not so"
        newest = max((want.want.request for want in pipeline.wants.values()), default=-1)
        if newest > pipeline.last_request:
            yield f"{name} waits for request {newest}, its newest is {pipeline.last_request}"


def _owners(state: SchedulerState) -> Iterator[str]:
    owner: list[Lease | None] = [None] * len(state.owner)
    for name, pipeline in state.pipelines.items():
        for cluster, held in pipeline.held.items():
            for gpu in held.gpus:
                owner[gpu] = Lease(name, cluster, -1, held.epoch)
        for rank, awake in pipeline.awake.items():
            for gpu in pipeline.topology.ranks[rank]:
                owner[gpu] = Lease(name, ACTOR_INFER, rank, awake.epoch)
    for gpu, (kept, real) in enumerate(zip(state.owner, owner, strict=True)):
        if kept != real:
            yield f"GPU {gpu} is on the ledger of {kept}, and {real} has it"
    newest = max((lease.epoch for lease in owner if lease is not None), default=0)
    if newest > state.epoch:
        yield f"a lease has epoch {newest}, the newest is said to be {state.epoch}"


def _claims(state: SchedulerState) -> Iterator[str]:
    claimed = {gpu: claim for claim in state.claims.values() for gpu in claim.gpus}
    if state.claimed != claimed:
        yield f"GPUs {sorted(state.claimed)} are claimed, by the claims {sorted(claimed)}"
    for name, pipeline in state.pipelines.items():
        ranks = {rank for whose, _, rank in state.claims if whose == name and rank >= 0}
        if pipeline.claimed_ranks != ranks:
            yield f"ranks {sorted(pipeline.claimed_ranks)} of {name} are to wake, by the claims {sorted(ranks)}"
    for whose, cluster, _ in state.claims:
        if whose not in state.pipelines:
            yield f"{whose}/{cluster} claims GPUs and is not registered"


def _trained_on(pipeline: PipelineState) -> set[int]:
    return {gpu for cluster in pipeline.spec.clusters if cluster.name == ACTOR_TRAIN for gpu in cluster.gpus}


def _lacks_a_rank(pipeline: PipelineState) -> bool:
    """Whether it has work for generation and no rank that is up or claimed."""
    if pipeline.demand.remaining <= 0 or pipeline.withdraws or pipeline.fenced or pipeline.claimed_ranks:
        return False
    return not any(rank.phase in _UP for rank in pipeline.awake.values())

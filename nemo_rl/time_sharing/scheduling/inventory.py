"""Reconciles the ledger with a pipeline's own inventory, once per pipeline after a scheduler restart.

The log is exact up to where it ends; if its end was lost, agents hold or have released things that the ledger does not
know. A hold that only one agent claims is adopted; one that contradicts another holder fences the claiming pipeline,
because a GPU is never on two ledgers.
"""

from __future__ import annotations

from collections.abc import Callable

from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.log.ledger import PipelineState
from nemo_rl.time_sharing.log.state import SchedulerState
from nemo_rl.time_sharing.protocol.types import ACTOR_TRAIN, Phase, Status, Verb
from nemo_rl.time_sharing.scheduling.executor import Executor


def reconcile(state: SchedulerState, executor: Executor, emit: Callable[[object], None], status: Status) -> None:
    """Adopts holds of `status` that the ledger lacks, frees holds of the ledger that `status` lacks; fences the
    pipeline if neither is possible.
    """
    name, pipeline = status.pipeline, state.pipelines[status.pipeline]
    granting = {c.cluster for c in state.commands.values() if c.pipeline == name and c.verb == Verb.GRANT}
    for held in status.holds:
        known = pipeline.held.get(held.cluster)
        if (
            held.cluster not in pipeline.topology.clusters
            or held.cluster != ACTOR_TRAIN
            or (known is not None and known.epoch >= held.epoch)
        ):
            continue
        if known is not None:
            emit(ev.Released(name, held.cluster, known.epoch, -1))
        gpus = pipeline.topology.clusters[held.cluster].gpus
        if not _clear(state, emit, gpus):
            executor.fence(
                name,
                f"it holds {held.cluster} (epoch {held.epoch}), which the log has given to others",
                contested=_unbooked(state, status),
            )
            return
        emit(
            ev.Granted(
                name,
                held.cluster,
                held.epoch,
                gpus,
                held.priority,
                -1,
                pipeline.last_request,
                state.time + state.limits.max_hold_s,
            )
        )
    holds = {held.cluster for held in status.holds}
    for cluster, known in list(pipeline.held.items()):
        if cluster not in holds and cluster not in granting:
            emit(ev.Released(name, cluster, known.epoch, -1))
    _ranks(state, executor, emit, status, pipeline)


def _unbooked(state: SchedulerState, status: Status) -> tuple[int, ...]:
    """GPUs that a pipeline says it occupies and that are not its own by the ledger."""
    topology = state.pipelines[status.pipeline].topology
    said = {
        gpu
        for held in status.holds
        if held.cluster in topology.clusters
        for gpu in topology.clusters[held.cluster].gpus
    }
    said |= {gpu for rank, _ in status.awake if 0 <= rank < len(topology.ranks) for gpu in topology.ranks[rank]}
    booked = {gpu for gpu in said if (lease := state.owner[gpu]) is not None and lease.pipeline == status.pipeline}
    return tuple(sorted(said - booked))


def _being_ended(state: SchedulerState, status: Status, rank: int) -> bool:
    """Whether the ledger knows that the rank's processes are still there: they could not be ended so far, and it is
    tried again.
    """
    return any(q.whose == (status.pipeline, status.incarnation, rank) for q in state.quarantines)


def _ranks(
    state: SchedulerState, executor: Executor, emit: Callable[[object], None], status: Status, pipeline: PipelineState
) -> None:
    name = status.pipeline
    awake = dict(status.awake)
    for rank, epoch in awake.items():
        known = pipeline.awake.get(rank)
        if (
            not 0 <= rank < len(pipeline.topology.ranks)
            or (known is not None and known.epoch >= epoch)
            or _being_ended(state, status, rank)
            # Said before this scheduler saw the rank's end.
            or epoch <= executor.slept.get((name, status.incarnation, rank), -1)
        ):
            continue
        if known is not None:
            # The ledger knows an earlier lease of this rank: that has ended, and a later one begun, in the lost part of
            # the log.
            emit(ev.RankMoved(name, rank, Phase.ASLEEP, known.epoch))
        if not _clear(state, emit, pipeline.topology.ranks[rank]):
            reason = f"its rank {rank} (epoch {epoch}) is awake on GPUs which the log has given to others"
            executor.fence(name, reason, contested=_unbooked(state, status))
            return
        emit(ev.RankMoved(name, rank, Phase.RISING, epoch))
        executor.begin_shrink(name, rank)
    for rank, known in list(pipeline.awake.items()):
        if known.phase is not Phase.SERVING:
            continue
        if rank not in awake:
            emit(ev.RankMoved(name, rank, Phase.ASLEEP, known.epoch))
        elif rank not in status.serving:
            # Its drain command is in the lost part of the log, so no later command would resume it.
            executor.begin_shrink(name, rank)


def _clear(state: SchedulerState, emit: Callable[[object], None], gpus: tuple[int, ...]) -> bool:
    """Whether the GPUs are free; claims of others on them are dropped, since they were not yet leases."""
    if not all(state.free(gpu) for gpu in gpus):
        return False
    for gpu in gpus:
        claim = state.claimed.get(gpu)
        if claim is not None:
            emit(ev.ClaimDropped(claim.pipeline, claim.cluster, claim.rank, "already taken"))
    return True

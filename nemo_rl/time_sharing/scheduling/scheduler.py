"""The scheduler without I/O: takes registrations, statuses and answers, plans after changes, and renews or fences
leases.

Every effect is an event in the log before it is a command on the wire, so a killed scheduler goes on from its log;
entries that the log has lost are recovered from the agents' inventories. It owns no thread, socket or clock: callers
pass readings and carry the commands.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.log.state import EXPIRED, PipelineState, SchedulerState, replay
from nemo_rl.time_sharing.planning import planner
from nemo_rl.time_sharing.planning.plan import Plan, Snapshot, explain, reason_text
from nemo_rl.time_sharing.protocol.quotas import QuotaNode
from nemo_rl.time_sharing.protocol.topology import (
    IncarnationUsed,
    Pool,
    RegistrationError,
    StillRegistered,
    Topology,
    register,
)
from nemo_rl.time_sharing.protocol.types import (
    ACTOR_TRAIN,
    Answer,
    Command,
    EndedRequest,
    Limits,
    Phase,
    Reply,
    Status,
    Verb,
    admissible,
    answer_problem,
    is_whole,
    shown,
    status_problem,
)
from nemo_rl.time_sharing.scheduling.executor import Executor
from nemo_rl.time_sharing.scheduling.liveness import Liveness, SteadyClock
from nemo_rl.time_sharing.scheduling.trials import Trials
from nemo_rl.utils.record import Entry, Record


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
            # Its processes could not be ended so far, and it is tried again.
            or any(q.whose == (name, status.incarnation, rank) for q in state.quarantines)
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


logger = logging.getLogger(__name__)

PlanRule = Callable[[Snapshot, float], Plan]
_LOST_TERMS = 1000
"""Room for the schedulers of which a log that has lost its end says nothing: agents would take a command of the same
term and number for one they know."""
_WEIGH_S = 60.0
"""How often is counted what each group and user has had."""
_REPLAN = frozenset(
    {
        ev.QuotasSet,
        ev.Requested,
        ev.RequestDropped,
        ev.Released,
        ev.ClaimDropped,
        ev.Leaving,
        ev.Paused,
        ev.Resumed,
        ev.Fenced,
        ev.Unregistered,
        ev.GpusCleared,
        ev.InventoryDone,
        ev.NodeDraining,
        ev.NodeHere,
    }
)


class Scheduler:
    """Decides and keeps the ledger.

    record: where events go, written with `clock.now` as time. send: hands a command to the agent of its pipeline, or a
    REAP to the daemon that ends processes. clock: steady time, advanced here only. notify: tells an agent at once that
    it is dismissed (if that is lost, the reply to its next heartbeat says so). rule: the planner.
    """

    def __init__(
        self,
        record: Record,
        send: Callable[[Command], None],
        clock: SteadyClock,
        *,
        notify: Callable[[Reply], None] = lambda reply: None,
        rule: PlanRule = planner.plan,
        explains: bool = False,
    ) -> None:
        self.state = SchedulerState()
        self.clock = clock
        self._record, self._rule = record, rule
        self._explains = explains
        self._send_now, self._notify = send, notify
        self._outgoing: list[Command] = []
        self._executor = Executor(self.state, self._emit, self._outgoing.append, lambda: clock.now)
        self._seqs: dict[str, int] = {}
        self._answered: dict[str, int] = {}
        self._inventoried: set[str] = set()
        self._liveness = Liveness(self.state, self._emit)
        self._requests = Requests(self.state, self._emit)
        self._trials = Trials(self.state, self._emit, self._executor.drop_claims)
        self._grace_until = float("-inf")
        self._dirty = False
        self._urgent = False
        self._planned_at = float("-inf")
        self._replan_by: float | None = None
        self._timers_due = 0.0

    def open(
        self, pool: Pool, limits: Limits, reading: float, *, complete: bool = True, away: Iterable[int] = ()
    ) -> None:
        """Begins a new log over a pool, of which some nodes are `away`; not `complete` if there was one that is lost,
        so that somebody may hold GPUs (see `recover`).
        """
        self.clock.advance(reading)
        self._emit(ev.PoolOpened(pool.nodes, pool.gpus_per_node, asdict(limits), pool.slots_per_gpu))
        for node in away:
            self._emit(ev.NodeAway(node))
        self._restart(1 if complete else _LOST_TERMS, complete=complete)
        self._flush()

    def recover(self, entries: Iterable[Entry], reading: float, *, complete: bool = True) -> None:
        """Restores the state from a log. Nothing is granted until each registered pipeline has reported its holds or
        was fenced.

        complete: the log ends where the last scheduler ended (true after the death of a process, since the log reaches
        the operating system before any command leaves; see `log_end`). If it may have lost its end, nothing is granted
        for one lease either: a pipeline whose registration was lost shows itself by a heartbeat and is ended. The same
        holds if the previous scheduler went on from such a log and died before that lease was over. Raises
        InconsistentLog when the log contradicts itself.
        """
        self.clock.advance(reading)
        self.state.__dict__.update(replay(entries).__dict__)
        complete = complete and not self.state.unsure
        self._restart(self.state.term + (1 if complete else _LOST_TERMS), complete=complete)
        for name in self.state.pipelines:
            self._liveness.heard(name, self.clock.now)
        self._executor.resume()
        self._inventoried.update(name for name, p in self.state.pipelines.items() if p.fenced)
        self._finish_inventory()
        self._flush()

    def register(
        self,
        pipeline: str,
        namespace: str,
        tps: Mapping[str, int],
        mappings: Mapping[str, Sequence[int]],
        reading: float,
        *,
        incarnation: int = 0,
        full_overlap: bool = False,
        **options: Any,
    ) -> Topology:
        """Registers and admits a pipeline; repeating the same registration changes nothing while it lasts. See
        `topology.register` for `full_overlap` and the options.

        incarnation: larger than any that this name was registered under before. Raises RegistrationError for a mistake
        of the user, StillRegistered while an earlier incarnation is being taken down, IncarnationUsed for one that has
        been.
        """
        self._advance(reading)
        pool = self.state.pool
        topology = register(pool, pipeline, namespace, tps, mappings, full_overlap=full_overlap, **options)
        known = self.state.pipelines.get(pipeline)
        if known is not None and (known.incarnation, known.spec, known.fenced) == (incarnation, topology.spec, False):
            return known.topology
        if known is not None:
            if known.incarnation < incarnation and not known.fenced:
                self._executor.fence(pipeline, f"incarnation {incarnation} takes its place")
                self._flush()
            raise StillRegistered(
                f"incarnation {known.incarnation} is still registered; try again shortly, with a larger incarnation",
                pipeline=pipeline,
            )
        self._check_incarnation(pipeline, incarnation)
        spec = topology.spec
        self._emit(ev.Registered(pipeline, incarnation, namespace, spec.clusters, **spec.options()))
        self._liveness.heard(pipeline, self.clock.now)
        self._inventoried.add(pipeline)
        # The caller builds on being registered, so a scheduler that is killed now must still know of it afterwards.
        self._record.flush()
        self._flush()
        return topology

    def _check_incarnation(self, pipeline: str, incarnation: int) -> None:
        last = self.state.incarnations.get(pipeline, -1)
        if not is_whole(incarnation) or incarnation <= last:
            kind = IncarnationUsed if is_whole(incarnation) else RegistrationError
            raise kind(
                f"incarnation={shown(incarnation)} must be a whole number that was never used; the next free "
                f"one is {last + 1}",
                pipeline=pipeline,
            )

    def drain(self, pipeline: str, reading: float) -> None:
        """Gives a pipeline nothing more, sends its ranks to sleep and lets it go once it holds nothing; as if it had
        asked to leave itself.

        One that is not registered, or is leaving or fenced already, is left alone.
        """
        self._advance(reading)
        known = self.state.pipelines.get(pipeline)
        if known is not None and not known.leaving and not known.fenced:
            self._begin_leaving(pipeline)
            self._unregister_if_left(pipeline)
            self._plan_if_due()
        self._flush()

    def unregister(self, pipeline: str, reading: float) -> None:
        """Cuts a pipeline off and has its processes ended; one that is not registered, or is leaving or fenced already,
        is left alone.
        """
        self._advance(reading)
        known = self.state.pipelines.get(pipeline)
        if known is not None and not known.leaving and not known.fenced:
            self._executor.fence(pipeline, "it was unregistered")
        self._flush()

    def status(self, status: Status, reading: float) -> Reply:
        """Takes an agent's status; late and repeated ones change nothing.

        Malformed parts affect that pipeline alone: a bad demand or request is left out and the reply says so; a status
        of the wrong shape is ignored and is no heartbeat.
        """
        self._advance(reading)
        pipeline = self.state.pipelines.get(status.pipeline) if isinstance(status.pipeline, str) else None
        occupies = self.state.recovering and not status_problem(status) and (status.holds or status.awake)
        if occupies and (pipeline is None or pipeline.incarnation < status.incarnation):
            # Its registration, or that of this incarnation, is in the lost part of the log.
            self._executor.end_unknown(status.pipeline, status.incarnation)
            self._flush()
        if pipeline is None or pipeline.fenced or pipeline.incarnation != status.incarnation:
            return Reply(status.pipeline, status.incarnation, self.state.term, False)
        status, ended, refused = admissible(status, pipeline.topology.clusters)
        for reason in (*refused, *(request.reason for request in ended)):
            logger.error("event=status_refused pipeline=%s reason=%s", status.pipeline, reason)
        reply = Reply(
            status.pipeline,
            status.incarnation,
            self.state.term,
            True,
            ended + self._requests.expired(pipeline, status),
            refused,
        )
        if status.seq <= self._seqs.get(status.pipeline, -1):
            return reply
        self._seqs[status.pipeline] = status.seq
        self._liveness.heard(status.pipeline, self.clock.now)
        if status.term > self.state.term:
            self._restart(status.term + _LOST_TERMS, complete=False)
        if status.pipeline not in self._inventoried:
            # An inventory from before the last answer would undo that answer.
            if status.term < self.state.term or status.seq <= self._answered.get(status.pipeline, -1):
                return reply
            self._inventoried.add(status.pipeline)
            reconcile(self.state, self._executor, self._emit, status)
            self._finish_inventory()
        if not pipeline.fenced and status.pipeline in self.state.pipelines:
            self._take(pipeline, status)
        self._plan_if_due()
        self._flush()
        return reply

    def answer(self, answer: Answer, reading: float) -> None:
        """Takes an agent's answer to a command."""
        self._advance(reading)
        if problem := answer_problem(answer):
            logger.error("event=answer_refused reason=%s", problem)
        elif self._executor.answer(answer):
            if answer.pipeline in self.state.pipelines:
                self._answered[answer.pipeline] = max(answer.seq, self._answered.get(answer.pipeline, -1))
            self._unregister_if_left(answer.pipeline)
            self._plan_if_due()
        self._flush()

    def expected_start(self, name: str, gpus: tuple[int, ...], reading: float) -> tuple[float, str]:
        """In how many seconds these GPUs could be granted to a new pipeline (0: at once; infinity: unknown), and
        why not now, in words.
        """
        self._advance(reading)
        seconds, because = planner.expected_start(Snapshot.of(self.state), self.clock.now, name, gpus)
        return seconds, "" if because is None else reason_text(because, self.clock.now, self.state.pool.name_of)

    def drain_node(self, node: int, reading: float, within_s: float | None = None) -> None:
        """Gives nothing more on a node but to what trains there, until that has left; after `within_s` it is ended.

        Repeating it changes nothing; one that is away stays so.
        """
        self._advance(reading)
        if node not in self.state.draining and node not in self.state.away:
            self._emit(ev.NodeDraining(node, None if within_s is None else self.clock.now + within_s))
            self._executor.lease_claims()
            self._plan_if_due()
            self._record.flush()
        self._flush()

    def node_leaves(self, node: int, reading: float) -> bool:
        """Takes a drained node out of the pool; False while somebody trains there or holds GPUs of it."""
        self._advance(reading)
        if node not in self.state.away:
            if node not in self.state.draining or self.state.recovering:
                return False
            units = self.state.pool.units_of([node])
            trains = any(not p.topology.training_gpus.isdisjoint(units) for p in self.state.pipelines.values())
            if trains or not all(map(self.state.free, units)):
                return False
            self._emit(ev.NodeAway(node))
            self._record.flush()
        return True

    def node_comes(self, node: int, reading: float) -> None:
        """Takes a node into the pool, or keeps one that was to leave."""
        self._advance(reading)
        if node in self.state.draining or node in self.state.away:
            self._emit(ev.NodeHere(node))
            self._record.flush()
            self._plan_if_due()
        self._flush()

    def set_quotas(self, nodes: tuple[QuotaNode, ...], half_life_s: float, reading: float) -> dict[str, float]:
        """Divides the pool by these quotas from now on; the GPUs of each node whose jobs have more than its limit."""
        self._advance(reading)
        if (known := self.state.quota_use) is None or (known.nodes, known.half_life_s) != (nodes, half_life_s):
            self._emit(ev.QuotasSet(nodes, half_life_s))
        use, per_gpu = self.state.quota_use, self.state.pool.slots_per_gpu
        assert use is not None  # noqa: S101 - it was set
        above = {node: n / per_gpu for node, n in use.holds.items() if n > use.quotas.most.get(node, n)}
        self._plan_if_due()
        self._flush()
        return above

    def wanted(self, name: str) -> bool:
        """Whether another pipeline waits for GPUs that this one holds: to train on them, or to generate at all."""
        held = {gpu for cluster in self.state.pipelines[name].held.values() for gpu in cluster.gpus}
        for other, pipeline in self.state.pipelines.items():
            if other == name or pipeline.fenced or pipeline.paused:
                continue
            asked = {gpu for cluster in pipeline.wants for gpu in pipeline.topology.clusters[cluster].gpus}
            unscheduled = pipeline.unscheduled_since is not None and not pipeline.held and not pipeline.spec.scavenges
            if held & (asked | (pipeline.topology.mapped_gpus if unscheduled else set())):
                return True
        return False

    def tick(self, reading: float) -> float:
        """Runs the work that is due by time alone; returns the steady time by which it must be called again."""
        self._advance(reading)
        now = self.clock.now
        if now >= self._timers_due:
            self._liveness.update_isolation(now)
            isolated = self._liveness.isolated
            self._timers_due = min(self._executor.tick(isolated=isolated), now + 1.0)
            if not isolated:
                self._check_leases()
                self._end_what_stays()
                self._executor.retry_quarantined()
        use = self.state.quota_use
        if use is not None and use.quotas.nodes and now >= use.weighed_at + _WEIGH_S:
            self._emit(ev.UseWeighed(use.weighed(now)))
        self._trials.update(now)
        stale = now >= self._planned_at + self.state.limits.replan_s
        if (self._replan_by is not None and now >= self._replan_by) or stale:
            self._dirty = self._urgent = True
        self._plan_if_due()
        self._flush()
        due = self._timers_due
        if self._dirty:
            due = min(due, self._planned_at + self.state.limits.plan_interval_s)
        return due if self._replan_by is None else min(due, self._replan_by)

    def hello(self) -> list[Reply]:
        """First replies of a restarted scheduler to all registered agents, which make them report their inventories at
        once.
        """
        return [
            Reply(name, p.incarnation, self.state.term, True)
            for name, p in self.state.pipelines.items()
            if not p.fenced
        ]

    def _advance(self, reading: float) -> None:
        jumped = self.clock.advance(reading)
        if jumped:
            logger.warning("event=clock_jumped seconds=%.3f", jumped)
            self._emit(ev.ClockJumped(jumped))

    def _emit(self, event: object) -> None:
        self._record.emit(event)
        self.state.apply(event, self.clock.now)
        if type(event) in _REPLAN:
            self._dirty = self._urgent = True
            if isinstance(event, ev.Unregistered):
                # Its next incarnation is a larger one, so late messages of this one are recognised without these.
                self._liveness.forget(event.pipeline)
                self._trials.steps.forget(event.pipeline)
                for notes in (self._seqs, self._answered):
                    notes.pop(event.pipeline, None)
                self._inventoried.discard(event.pipeline)
        elif isinstance(event, ev.RankMoved) and event.phase in (Phase.ASLEEP, Phase.SERVING):
            self._dirty = True
            self._urgent = self._urgent or self._requests.concern(event)

    def _flush(self) -> None:
        """The log reaches the operating system before any command leaves."""
        if self._outgoing:
            self._record.flush()
            outgoing = list(self._outgoing)
            self._outgoing.clear()
            for command in outgoing:
                self._send_now(command)

    def _restart(self, term: int, *, complete: bool) -> None:
        self._grace_until = self.clock.now + (0.0 if complete else self.state.limits.lease_s)
        self._emit(ev.SchedulerStarted(term, complete))
        # Replies say the term before any command leaves; once an agent knows it, no successor may take it again.
        self._record.flush()
        self._inventoried = {name for name, p in self.state.pipelines.items() if p.fenced}

    def _finish_inventory(self) -> None:
        if not self.state.recovering:
            return
        known = {(name, pipeline.incarnation) for name, pipeline in self.state.pipelines.items()}
        known |= {(quarantine.pipeline, quarantine.incarnation) for quarantine in self.state.quarantines}
        unknown = any((c.pipeline, c.incarnation) not in known for c in self.state.commands.values())
        # A pipeline that is being ended may hold GPUs granted in the lost part of the log, and reports no more.
        unknown |= self.state.unsure and any(pipeline.fenced for pipeline in self.state.pipelines.values())
        if self._inventoried >= self.state.pipelines.keys() and self.clock.now >= self._grace_until and not unknown:
            self._emit(ev.InventoryDone(self.state.term))
            self._executor.lease_claims()
            self._dirty = self._urgent = True

    def _take(self, pipeline: PipelineState, status: Status) -> None:
        name = status.pipeline
        for back in status.given_back:
            held = pipeline.held.get(back.cluster)
            if held is not None and held.epoch <= back.epoch:
                self._emit(ev.Released(name, back.cluster, held.epoch, back.version))
                self._trials.steps.released(name, back.version, self.clock.now)
                self._executor.lease_claims_on(held.gpus)
        self._requests.take(pipeline, status)
        demand = status.demand
        if demand.seq > pipeline.demand.seq:
            began = pipeline.demand.remaining == 0
            self._emit(ev.DemandReported(name, *demand))
            self._dirty = True
            self._urgent = self._urgent or began
        if status.builds and not pipeline.builds:
            self._emit(ev.BuildsAhead(name))
            self._dirty = True
        for rank in status.broken:
            if rank in pipeline.awake:
                self._executor.begin_cooling(name, rank)
        if status.leaving and not pipeline.leaving:
            self._begin_leaving(name)
        self._unregister_if_left(name)

    def _begin_leaving(self, name: str) -> None:
        self._emit(ev.Leaving(name))
        self._executor.drop_claims(name, "leaving")

    def _unregister_if_left(self, name: str) -> None:
        pipeline = self.state.pipelines.get(name)
        if pipeline is None or not pipeline.leaving or pipeline.fenced or pipeline.awake or pipeline.held:
            return
        if any(command.pipeline == name for command in self.state.commands.values()):
            return
        for cluster, queued in list(pipeline.wants.items()):
            self._emit(ev.RequestDropped(name, cluster, queued.want.request, "leaving"))
        self._emit(ev.Unregistered(name, pipeline.incarnation, "left"))
        self._record.flush()
        self._notify(Reply(name, pipeline.incarnation, self.state.term, False))

    def _check_leases(self) -> None:
        for name, pipeline in list(self.state.pipelines.items()):
            if pipeline.fenced:
                continue
            reason = self._liveness.overdue(name, self.clock.now)
            if reason is None:
                self._requests.expire(name, pipeline, self.clock.now)
                continue
            self._executor.fence(name, reason)
            self._inventoried.add(name)
            self._finish_inventory()

    def _end_what_stays(self) -> None:
        """Fences what still trains on nodes that are to be free by now."""
        due = [node for node, by in self.state.draining.items() if by is not None and self.clock.now >= by]
        for node, name in [(node, name) for node in due for name in sorted(self.state.pipelines)]:
            pipeline, units = self.state.pipelines[name], self.state.pool.units_of([node])
            if not pipeline.fenced and not pipeline.topology.training_gpus.isdisjoint(units):
                self._executor.fence(name, f"node {node} leaves, and it still trains there")
                self._inventoried.add(name)
                self._finish_inventory()

    def _plan_if_due(self) -> None:
        self._finish_inventory()
        now = self.clock.now
        rested = now >= self._planned_at + self.state.limits.plan_interval_s
        if not self._dirty or self.state.recovering or not (self._urgent or rested):
            return
        self._dirty = self._urgent = False
        self._planned_at, self._replan_by = now, None
        plan = self._rule(Snapshot.of(self.state), now)
        self._replan_by = plan.wake_at
        if plan.empty:
            return
        if self._explains:
            sentences = tuple(explain(plan, now, self.state.pool.name_of))
            self._emit(ev.PlanExplained(self.state.plan + 1, sentences, dict(plan.entitled)))
        self._executor.start(plan)

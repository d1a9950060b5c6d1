"""The pipeline agent: the true state of its ranks, the commands that it obeys or refuses, and the weights in them.

One state machine per rank. SERVE is wake -> sync (again, if the weights change meanwhile) -> wait until that version is
published -> route; VACATE is unroute -> drain -> sleep; BUILD is wake -> sleep. A rank that is busy does one step at a
time and remembers the newest command, which takes over when the step ends; slow steps are carried out by a `Host`,
which reports back through `performed`. Commands are idempotent: a repeated one is answered from memory, one of a past
epoch or term is refused. Invariants: a rank is routed only with the published weights, a version is published only when
every serving rank has it, and training GPUs are given back only after the new version is published.
"""

from __future__ import annotations

import logging
import operator
from collections import OrderedDict
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from nemo_rl.time_sharing.log.events import MemoryFreed, MemoryTaken
from nemo_rl.time_sharing.protocol.topology import Topology
from nemo_rl.time_sharing.protocol.types import (
    MAX_COUNT,
    Answer,
    Command,
    CommandOutcome,
    Demand,
    EndedRequest,
    GivenBack,
    Held,
    Limits,
    Priority,
    Reply,
    Status,
    Verb,
    Want,
    cannot_be_requested,
    is_whole,
    shown,
)
from nemo_rl.utils import record_events as rec
from nemo_rl.utils.progress import fiftieth
from nemo_rl.utils.record import Record

logger = logging.getLogger(__name__)

_MEMORY = 4096


class LocalPhase(str, Enum):
    """Where a rank is on its way; it takes requests in ROUTED only."""

    ASLEEP = "asleep"
    WAKING = "waking"
    SYNCING = "syncing"
    READY = "ready"
    ROUTED = "routed"
    DRAINING = "draining"
    SLEEPING = "sleeping"


class RankStep(str, Enum):
    """What a host does to one engine. REFRESH: new weights into a rank that serves."""

    WAKE = "wake"
    SYNC = "sync"
    REFRESH = "refresh"
    DRAIN = "drain"
    SLEEP = "sleep"


class ProtocolError(RuntimeError):
    """The pipeline's call is not allowed at this point; the message names the call that must come first."""


def longest_s(step: RankStep, limits: Limits, drain_s: float) -> float:
    """Seconds that a step may take. `drain_s`: of the pipeline's registration."""
    return {
        RankStep.WAKE: limits.wake_s,
        RankStep.SYNC: limits.sync_s,
        RankStep.REFRESH: limits.sync_s,
        RankStep.DRAIN: max(limits.drain_s, drain_s),
        RankStep.SLEEP: limits.sleep_s,
    }[step]


class Operation(NamedTuple):
    """Something that takes time; `version` is what SYNC and REFRESH load."""

    number: int
    kind: RankStep
    rank: int
    version: int


class Host(Protocol):
    """Runs the agent's operations on engines and sends its messages. No method may call back before it returns."""

    def perform(self, operation: Operation) -> None: ...

    def answer(self, answer: Answer) -> None: ...

    def status(self, status: Status) -> None: ...

    def granted(self, cluster: str, priority: Priority, step: int) -> None: ...

    def request_ended(self, want: Want, reason: str) -> None:
        """A request ended without a grant; its cluster has to be requested again."""

    def routing_changed(self, rank: int, active: bool) -> None: ...

    def refreshed(self, version: int) -> None: ...

    def dismissed(self, left: bool) -> None: ...


@dataclass(slots=True)
class LocalRank:
    """State of one rank: phase, epoch of its last command, version of the loaded weights (-1 none), the running
    operation, the command that it obeys and the one that takes over. `resident`: a wake has succeeded. `broken`: it
    cannot serve. `hung`: its operation takes longer than it may. `over`: the newest epoch whose lease has ended.
    """

    phase: LocalPhase = LocalPhase.ASLEEP
    epoch: int = 0
    version: int = -1
    busy: Operation | None = None
    doing: Command | None = None
    waiting: Command | None = None
    newest: tuple[int, int] = (0, 0)
    broken: bool = False
    hung: bool = False
    resident: bool = False
    over: int = 0


@dataclass(slots=True)
class LocalHold:
    """A fixed cluster that this pipeline holds."""

    epoch: int
    gpus: tuple[int, ...]
    priority: Priority


class Agent:
    """The agent's state machine: ranks and their weights, clusters held and requested, and statuses.

    `version` is the weight version that the pipeline starts with (0, or that of its checkpoint).
    """

    def __init__(
        self,
        topology: Topology,
        incarnation: int,
        host: Host,
        record: Record,
        *,
        version: int = 0,
        request_s: float = 86400.0,
    ) -> None:
        self.topology, self.incarnation = topology, incarnation
        self._host, self._record = host, record
        self.ranks = [LocalRank() for _ in topology.ranks]
        self.cached = self.published = version
        self.generation = 0
        self._answers: OrderedDict[str, Answer] = OrderedDict()
        self._refreshing: set[int] = set()
        self._refresh_begun = self._recompute_kv = False
        self._seq = self._operations = 0
        self.holds: dict[str, LocalHold] = {}
        self.wants: dict[str, Want] = {}
        self.demand = Demand()
        self.leaving = self.builds = False
        self._request_s = request_s
        self._given_back: dict[str, GivenBack] = {}
        self._term = self._requests = 0
        self._rank_batch = 0
        self._dismissed = self._held_back = self._unsaid = False
        self._last_refused: tuple[str, ...] = ()

    # Ranks and weights.

    def begin_at(self, version: int) -> None:
        """The run begins with the weights of `version`; only before any rank has weights."""
        if any(rank.phase in (LocalPhase.SYNCING, LocalPhase.READY, LocalPhase.ROUTED) for rank in self.ranks):
            raise ProtocolError(f"{self.topology.pipeline}: ranks have weights; the first version comes before them")
        self.cached = self.published = version

    def refresh(self, *, recompute_kv: bool = False) -> None:
        """Syncs the cached weights to every active rank, then publishes them and calls the host's `refreshed`.
        `recompute_kv`: whether the host recomputes the KV cache of running requests; for the record.
        """
        self._recompute_kv = recompute_kv
        self._refresh_begun = self.published != self.cached
        self._refreshing = {index for index, rank in enumerate(self.ranks) if rank.phase is LocalPhase.ROUTED}
        for index in sorted(self._refreshing):
            # One that still takes an earlier version takes this one after it.
            if self.ranks[index].busy is None:
                self._begin_refresh(index)
        self._publish_if_refreshed()

    def _begin_refresh(self, index: int) -> None:
        operation = self._perform(index, RankStep.REFRESH, self.cached)
        started = (self._sync_id(operation), self.cached, (index,), operation.kind.value, self._recompute_kv)
        self._record.emit(rec.SyncStarted(*started))

    def performed(self, operation: Operation, ok: bool, loaded: int | None = None) -> None:
        """The host has finished an operation; one that was given up meanwhile is ignored.

        loaded: the version that a sync or refresh brought, where that may be newer than the one it was begun with.
        """
        rank = self.ranks[operation.rank]
        if rank.busy != operation:
            return
        if loaded is not None and loaded > operation.version >= 0:
            operation = operation._replace(version=loaded)
        rank.busy, rank.hung = None, False
        self._note(rank, operation, ok)
        command, rank.doing = rank.doing, None
        following, rank.waiting = rank.waiting, None
        if command is not None and not ok:
            detail = f"{operation.kind.value} of rank {operation.rank} failed"
            self._answer(command, CommandOutcome.FAILED, detail=detail)
        elif command is not None and following is not None and rank.phase is not LocalPhase.ASLEEP:
            self._refuse(command, f"command {following.command} takes over")
        elif command is not None:
            self._go_on(rank, command)
        if following is not None:
            self._begin(rank, following)
        if operation.kind is RankStep.REFRESH:
            self._go_on_refreshing(operation.rank)

    def step_overdue(self, operation: Operation) -> None:
        """An operation takes longer than `longest_s`: its command has failed, and so has every other for its rank until
        it ends or the scheduler has the rank's processes ended.
        """
        rank = self.ranks[operation.rank]
        if rank.busy != operation or rank.hung:
            return
        rank.hung = True
        commands, rank.doing, rank.waiting = (rank.doing, rank.waiting), None, None
        for command in commands:
            if command is not None:
                self._fail_hung(command, operation)
        if operation.kind is RankStep.REFRESH:
            self.rank_broken(operation.rank)
            self._go_on_refreshing(operation.rank)

    def _fail_hung(self, command: Command, operation: Operation) -> None:
        detail = f"{operation.kind.value} of rank {operation.rank} does not end"
        self._answer(command, CommandOutcome.FAILED, detail=detail)

    def rank_broken(self, index: int) -> None:
        """A serving rank makes no progress or answers no more: it takes no further request, and its
        failure is reported to the scheduler.
        """
        rank = self.ranks[index]
        if rank.phase is LocalPhase.ROUTED and not rank.broken:
            self._unroute(rank, index)
            rank.phase, rank.broken = LocalPhase.READY, True
            self.send_status()

    def rank_ended(self, index: int) -> None:
        """The processes of a rank were ended from outside; it is asleep with nothing loaded."""
        rank = self.ranks[index]
        if rank.phase is LocalPhase.ROUTED:
            self._unroute(rank, index)
        self._refreshing.discard(index)
        self.ranks[index] = LocalRank(epoch=rank.epoch, newest=rank.newest, over=rank.epoch)
        self._publish_if_refreshed()
        self.send_status()

    def _take_rank_command(self, rank: LocalRank, command: Command) -> None:
        if command.epoch < rank.epoch:
            self._refuse(command, f"epoch {command.epoch} of rank {command.rank} is over, it is at {rank.epoch}")
        elif command.order < rank.newest:
            # Overtaken on the wire by a later command, which has been obeyed; obeying this one now would undo it.
            self._refuse(command, f"a later command for rank {command.rank} came first")
        elif rank.doing is not None and rank.doing.command == command.command:
            return
        elif rank.busy is not None and rank.hung:
            rank.newest = command.order
            self._fail_hung(command, rank.busy)
        elif rank.busy is not None:
            rank.newest, rank.waiting = command.order, command
        else:
            self._begin(rank, command)

    def _begin(self, rank: LocalRank, command: Command) -> None:
        rank.epoch, rank.newest = max(rank.epoch, command.epoch), max(rank.newest, command.order)
        rank.doing = None
        index, phase = command.rank, rank.phase
        refusal = ""
        if command.verb not in (Verb.SERVE, Verb.VACATE, Verb.BUILD):
            refusal = f"{command.verb.value} is not for an agent"
        elif command.verb is not Verb.VACATE:
            if command.verb is Verb.SERVE and phase is LocalPhase.ASLEEP and command.epoch <= rank.over:
                # A scheduler that lost the end of its log may ask for a lease that has ended; its GPUs may be somebody
                # else's by now.
                refusal = f"the lease of epoch {command.epoch} is over; rank {index} slept since"
            elif command.verb is Verb.BUILD and phase is LocalPhase.ROUTED:
                refusal = f"rank {index} serves; its engine is built"
            elif rank.broken or phase in (LocalPhase.DRAINING, LocalPhase.SLEEPING):
                refusal = f"rank {index} {'is broken' if rank.broken else f'is {phase.value}'}; it has to sleep first"
        if refusal:
            self._refuse(command, refusal)
            return
        if command.verb is not Verb.VACATE and phase is LocalPhase.ASLEEP and command.epoch > rank.over:
            self._record.emit(MemoryTaken(f"rank {index}", self.topology.ranks[index]))
            rank.phase = LocalPhase.WAKING
        elif command.verb is Verb.VACATE and phase is LocalPhase.ASLEEP:
            # Its SERVE was lost or comes later; the lease is over all the same.
            rank.over = command.epoch
        elif command.verb is Verb.VACATE and (phase is LocalPhase.ROUTED or rank.broken):
            if phase is LocalPhase.ROUTED:
                self._unroute(rank, index)
            rank.phase = LocalPhase.DRAINING
        self._go_on(rank, command)

    def _go_on(self, rank: LocalRank, command: Command) -> None:
        """Takes the next step of a command, or answers it when it is done."""
        index, phase = command.rank, rank.phase
        if phase is LocalPhase.ASLEEP:
            self._answer(command, CommandOutcome.DONE)
        elif command.verb is Verb.SERVE:
            if not rank.resident:
                self._perform(index, RankStep.WAKE, -1, command)
            elif phase is LocalPhase.ROUTED:
                self._answer(command, CommandOutcome.DONE, rank.version)
            elif phase is not LocalPhase.READY or rank.version < self.cached:
                rank.phase = LocalPhase.SYNCING
                operation = self._perform(index, RankStep.SYNC, self.cached, command)
                self._record.emit(rec.SyncStarted(self._sync_id(operation), self.cached, (index,), "wake"))
            else:
                self._route(rank, command)
        elif command.verb is Verb.BUILD and not rank.resident:
            self._perform(index, RankStep.WAKE, -1, command)
        elif phase is LocalPhase.DRAINING:
            self._perform(index, RankStep.DRAIN, -1, command)
        else:
            rank.phase = LocalPhase.SLEEPING
            self._perform(index, RankStep.SLEEP, -1, command)

    def _route(self, rank: LocalRank, command: Command) -> None:
        if rank.version > self.published:
            # Its weights are newer than what is out: it waits for the publication that the refresh in progress ends
            # with.
            rank.doing = command
            return
        self._record.emit(rec.VersionPublished(rank.version, (command.rank,)))
        rank.phase = LocalPhase.ROUTED
        self.generation += 1
        self._record.emit(rec.ShardRouted(command.rank, self.generation, rank.version))
        self._answer(command, CommandOutcome.DONE, rank.version)
        self._host.routing_changed(command.rank, True)

    def _note(self, rank: LocalRank, operation: Operation, ok: bool) -> None:
        """Records the end of a step, and moves the rank where it is done."""
        index, kind, version = operation.rank, operation.kind, operation.version
        if kind in (RankStep.SYNC, RankStep.REFRESH):
            finished = (self._sync_id(operation), version, "done" if ok else "failed")
            self._record.emit(rec.SyncFinished(*finished, checksums={str(index): f"v{version}"}))
        if not ok:
            if kind is RankStep.REFRESH:
                self.rank_broken(index)
        elif kind is RankStep.WAKE:
            rank.resident = True
            self._record.emit(rec.ShardWoken(index))
        elif kind is RankStep.SYNC:
            rank.phase, rank.version = LocalPhase.READY, version
        elif kind is RankStep.REFRESH:
            rank.version = version
        elif kind is RankStep.DRAIN:
            rank.phase = LocalPhase.SLEEPING
        else:
            rank.phase, rank.version, rank.over = LocalPhase.ASLEEP, -1, rank.epoch
            rank.broken = rank.resident = False
            self._record.emit(rec.ShardSlept(index))
            self._record.emit(MemoryFreed(f"rank {index}", self.topology.ranks[index]))

    def _go_on_refreshing(self, index: int) -> None:
        rank = self.ranks[index]
        if (
            index in self._refreshing
            and rank.phase is LocalPhase.ROUTED
            and rank.busy is None
            and rank.version != self.cached
        ):
            self._begin_refresh(index)
            return
        self._refreshing.discard(index)
        self._publish_if_refreshed()

    def _publish_if_refreshed(self) -> None:
        # A rank may be ended between the cache and the refresh; what is left then has not got the new weights yet.
        if not self._refresh_begun or self._refreshing or self.published == self.cached:
            return
        self._refresh_begun = False
        self.published = self.cached
        serving = (index for index, rank in enumerate(self.ranks) if rank.phase is LocalPhase.ROUTED)
        updated = tuple(index for index in serving if self.ranks[index].version == self.published)
        self._record.emit(rec.VersionPublished(self.published, updated))
        for rank in self.ranks:
            if rank.busy is None and rank.doing is not None:
                command, rank.doing = rank.doing, None
                self._go_on(rank, command)
        self._host.refreshed(self.published)

    def _unroute(self, rank: LocalRank, index: int) -> None:
        # Recorded once it is so: a request that was handed over before is in the record before.
        self._host.routing_changed(index, False)
        self.generation += 1
        self._record.emit(rec.ShardUnrouted(index, self.generation))

    def _perform(self, index: int, kind: RankStep, version: int, command: Command | None = None) -> Operation:
        self._operations += 1
        operation = Operation(self._operations, kind, index, version)
        self.ranks[index].busy, self.ranks[index].doing = operation, command
        self._host.perform(operation)
        return operation

    def _answer(self, command: Command, outcome: CommandOutcome, version: int = -1, detail: str = "") -> None:
        self._seq += 1
        answer = Answer(command.command, command.pipeline, self.incarnation, outcome, version, detail, self._seq)
        self._answers[command.command] = answer
        if len(self._answers) > _MEMORY:
            self._answers.popitem(last=False)
        self._host.answer(answer)

    def _refuse(self, command: Command, why: str) -> None:
        what = (command.command, command.verb.value, command.pipeline)
        logger.info("event=refused command=%s verb=%s pipeline=%s reason=%s", *what, why)
        self._answer(command, CommandOutcome.REFUSED, detail=why)

    def _sync_id(self, operation: Operation) -> str:
        return f"{self.topology.pipeline}.{self.incarnation}.{operation.number}"

    # Calls of the pipeline.

    def want(self, cluster: str, priority: Priority, step: int, now: float) -> int:
        """Asks for all GPUs of a fixed cluster, or for another priority of one that is held. Returns the request's
        number. Raises ProtocolError for what cannot be asked for: generation is no request but demand
        (`set_demand`).
        """
        problem = cannot_be_requested(cluster, priority, self.topology.clusters)
        if not problem and not is_whole(step, -1):
            problem = f"{cluster} for step={shown(step)}: the step must be a whole number, -1 before the first"
        if problem:
            raise ProtocolError(f"{self.topology.pipeline}: {problem}")
        if self.leaving or cluster in self.wants:
            raise ProtocolError(
                f"{self.topology.pipeline}: {cluster} "
                + ("is requested already" if cluster in self.wants else "cannot be requested while leaving")
            )
        held = self.holds.get(cluster)
        if held is not None and held.priority is priority:
            raise ProtocolError(
                f"{self.topology.pipeline}: {cluster} is already held for {priority.name}; release it before "
                "asking again"
            )
        self._requests += 1
        self.wants[cluster] = Want(cluster, priority, self._requests, step)
        self._record.emit(
            rec.WaitBegun(
                self._wait_id(self._requests), f"{cluster} for {priority.name} of step {step}", now + self._request_s
            )
        )
        self.send_status()
        return self._requests

    def withdraw(self, cluster: str) -> None:
        """Takes a request back; a grant that crosses it is refused."""
        want = self.wants.pop(cluster, None)
        if want is not None:
            self._record.emit(rec.WaitEnded(self._wait_id(want.request), "cancelled"))
            self.send_status()

    def release(self, cluster: str) -> None:
        """Gives a fixed cluster back. Raises ProtocolError when new weights were built on it and are not
        published yet.
        """
        held = self.holds.get(cluster)
        if held is None:
            raise ProtocolError(f"{self.topology.pipeline}: {cluster} is not held; held: {sorted(self.holds)}")
        if held.priority is Priority.ACTOR_TRAINING and self.published != self.cached:
            raise ProtocolError(
                f"{self.topology.pipeline}: weights {self.cached} are built but {self.published} is published; "
                f"refresh and publish before the release of {cluster}"
            )
        del self.holds[cluster]
        self._given_back[cluster] = GivenBack(cluster, held.epoch, self.published)
        self._record.emit(MemoryFreed(cluster, held.gpus))
        self.send_status()

    def cache_built(self, version: int) -> None:
        """New weights are in the host cache, taken while they were resident on the training GPUs."""
        if not any(held.priority is Priority.ACTOR_TRAINING for held in self.holds.values()):
            raise ProtocolError(
                f"{self.topology.pipeline}: the cache of version {version} must be built while the training "
                "GPUs are held"
            )
        if version <= self.cached:
            raise ProtocolError(f"{self.topology.pipeline}: cache version {version} does not follow {self.cached}")
        self.cached = version

    def set_demand(self, target: int, done: int = 0, unit: int = 1) -> None:
        """Sets what generation is waited for: `target` units of `unit` samples, `done` of which are there; a target of
        0 ends the demand. Sent at once, but progress of one batch only with every fiftieth of it. Raises ProtocolError
        for a malformed count.
        """
        target, done = self._count("target", target), self._count("done", done)
        unit, before = self._count("unit", unit, least=1), self.demand
        self.demand = Demand(target, min(done, target), unit, self.demand.seq + 1, self._rank_batch)
        grows = (target, unit) == (before.target, before.unit) and done > before.done
        if not grows or fiftieth(self.demand.done, target) != fiftieth(before.done, target):
            self.send_status()

    def batch_measured(self, rank_batch: int) -> None:
        """Number of samples that one engine runs at once at good speed; sent with the next demand. Raises ProtocolError
        if it is no whole number from 1.
        """
        self._rank_batch = self._count("rank_batch", rank_batch, least=1)

    def builds_ahead(self) -> None:
        """The engines can be built from here on, without weights: the scheduler may have that done ahead of their first
        wakes.
        """
        self.builds = True
        self.send_status()

    def leave(self) -> None:
        """The pipeline is done: its ranks will be put to sleep, then it is dismissed."""
        self.leaving = True
        self.demand = Demand(seq=self.demand.seq + 1, rank_batch=self._rank_batch)
        for cluster in list(self.wants):
            self.withdraw(cluster)
        self.send_status()

    @contextmanager
    def one_status(self) -> Generator[None]:
        """Combines the changes made in the block into one status, so that GPUs that are released and requested again
        are not reassigned in between.
        """
        self._held_back, self._unsaid = True, False
        try:
            yield
        finally:
            self._held_back = False
            if self._unsaid:
                self.send_status()

    def send_status(self) -> None:
        """Sends the whole status; also the heartbeat."""
        if self._held_back:
            self._unsaid = True
            return
        self._seq += 1
        holds = tuple(Held(cluster, held.epoch, held.priority) for cluster, held in self.holds.items())
        awake = tuple((i, r.epoch) for i, r in enumerate(self.ranks) if r.phase is not LocalPhase.ASLEEP)
        serving = tuple(i for i, r in enumerate(self.ranks) if r.phase is LocalPhase.ROUTED)
        broken = tuple(i for i, r in enumerate(self.ranks) if r.broken)
        self._host.status(
            Status(
                self.topology.pipeline,
                self.incarnation,
                self._seq,
                self.demand,
                tuple(self.wants.values()),
                holds,
                tuple(self._given_back.values()),
                awake,
                serving,
                broken,
                self.leaving,
                self._term,
                self.builds,
            )
        )

    # Messages of the scheduler.

    def heard(self, reply: Reply) -> None:
        """Takes the scheduler's reply to a status."""
        if reply.incarnation != self.incarnation or self._dismissed:
            return
        if not reply.registered:
            self._dismissed = True
            self._host.dismissed(self.leaving)
            return
        if reply.refused != self._last_refused:
            self._last_refused = reply.refused
            for problem in reply.refused:
                logger.error("event=status_refused pipeline=%s reason=%s", self.topology.pipeline, problem)
        for ended in reply.ended:
            self._request_ended(ended)
        if reply.term > self._term:
            self._term = reply.term
            self.send_status()

    def command(self, command: Command) -> None:
        """Obeys a command, or answers why not."""
        if command.incarnation != self.incarnation or command.term < self._term or self._dismissed:
            return
        self._term = command.term
        known = self._answers.get(command.command)
        if known is not None:
            self._host.answer(known)
        elif command.verb is Verb.GRANT:
            self._take_grant(command)
        elif not 0 <= command.rank < len(self.ranks):
            self._refuse(command, f"there is no rank {command.rank}; ranks are 0..{len(self.ranks) - 1}")
        else:
            self._take_rank_command(self.ranks[command.rank], command)

    # How it is done.

    def _request_ended(self, ended: EndedRequest) -> None:
        want = next((want for want in self.wants.values() if want.request == ended.request), None)
        if want is not None:
            logger.warning(
                "event=request_ended pipeline=%s cluster=%s request=%d reason=%s",
                self.topology.pipeline,
                want.cluster,
                want.request,
                ended.reason,
            )
            del self.wants[want.cluster]
            self._record.emit(rec.WaitEnded(self._wait_id(want.request), "expired"))
            self._host.request_ended(want, ended.reason)

    def _count(self, name: str, value: int, least: int = 0) -> int:
        """Converts any integer type (such as numpy's) to a plain int for the wire. Raises ProtocolError."""
        try:
            count = int(operator.index(value))
        except TypeError:
            count = -1
        if not is_whole(count, least):
            raise ProtocolError(
                f"{self.topology.pipeline}: progress {name}={shown(value)} must be a whole number from "
                f"{least} to {MAX_COUNT:.0e}"
            )
        return count

    def _take_grant(self, command: Command) -> None:
        held = self.holds.get(command.cluster)
        want = self.wants.get(command.cluster)
        back = self._given_back.get(command.cluster)
        if held is None and (
            want is None or want.request != command.request or (back is not None and command.epoch <= back.epoch)
        ):
            self._refuse(command, f"{command.cluster} is not wanted (request {command.request})")
            return
        if held is not None and held.epoch != command.epoch:
            self._refuse(command, f"{command.cluster} is held under epoch {held.epoch}")
            return
        asked = want is not None and want.request == command.request
        if held is not None and not asked:
            # Sent again by a new scheduler, it may arrive after the grant that came next; obeyed now, it would take
            # training back to log-probs.
            self._answer(command, CommandOutcome.DONE)
            return
        if want is not None and asked:
            del self.wants[command.cluster]
            self._record.emit(rec.WaitEnded(self._wait_id(want.request)))
        if held is None:
            self._record.emit(MemoryTaken(command.cluster, command.gpus))
        self.holds[command.cluster] = LocalHold(command.epoch, command.gpus, command.priority)
        self._answer(command, CommandOutcome.DONE)
        self.send_status()
        self._host.granted(command.cluster, command.priority, command.step)

    def _wait_id(self, request: int) -> str:
        return f"{self.topology.pipeline}.{self.incarnation}.{request}"

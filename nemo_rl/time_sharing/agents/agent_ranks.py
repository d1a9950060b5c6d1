"""The generation ranks of one pipeline as they really are: the commands each obeys or refuses, and the weights in them.

One state machine per rank; a rank that is busy does one thing at a time and remembers the next. Invariants: a rank is
routed only with the published weights, and a version is published only when every serving rank has it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from nemo_rl.time_sharing.log.events import MemoryFreed, MemoryTaken
from nemo_rl.time_sharing.protocol.topology import Topology
from nemo_rl.time_sharing.protocol.types import Answer, Command, CommandOutcome, Phase, Priority, Status, Verb, Want
from nemo_rl.utils import record_events as rec
from nemo_rl.utils.record import Record

REFRESH = "refresh"


class ProtocolError(RuntimeError):
    """The pipeline's call is not allowed at this point; the message names the call that must come first."""


class Operation(NamedTuple):
    """Something that takes time: a rank command's `kind` (drain, sleep, wake, sync) or `refresh`; `version` is what
    sync and refresh load.
    """

    number: int
    kind: str
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
    operation and the next command. `resident`: a wake has succeeded. `broken`: it cannot serve. `over`: the newest
    epoch whose lease has ended.
    """

    phase: Phase = Phase.ASLEEP
    epoch: int = 0
    version: int = -1
    busy: Operation | None = None
    doing: Command | None = None
    waiting: Command | None = None
    newest: tuple[int, int] = (0, 0)
    broken: bool = False
    resident: bool = False
    over: int = 0


@dataclass(slots=True)
class LocalHold:
    """A fixed cluster that this pipeline holds."""

    epoch: int
    gpus: tuple[int, ...]
    priority: Priority
    step: int


logger = logging.getLogger(__name__)

_MEMORY = 4096


class RankKeeper:
    """All ranks of a pipeline. `version` is the weight version that it starts with."""

    def __init__(self, topology: Topology, incarnation: int, host: Host, record: Record, version: int) -> None:
        self.topology, self.incarnation = topology, incarnation
        self.ranks = [LocalRank() for _ in topology.ranks]
        self.cached = self.published = version
        self.generation = 0
        self._host, self._record = host, record
        self._answers: OrderedDict[str, Answer] = OrderedDict()
        self._refreshing: set[int] = set()
        self._refresh_begun = self._recompute_kv = False
        self._seq = self._operations = 0

    def send_status(self) -> None:
        """Sends the whole status; also the heartbeat."""
        raise NotImplementedError

    def begin_at(self, version: int) -> None:
        """The run begins with the weights of `version`; only before any rank has weights."""
        if any(rank.phase in (Phase.SYNCING, Phase.READY, Phase.ACTIVE) for rank in self.ranks):
            raise ProtocolError(f"{self.topology.pipeline}: ranks have weights; the first version comes before them")
        self.cached = self.published = version

    def refresh(self, *, recompute_kv: bool = False) -> None:
        """Syncs the cached weights to every active rank, then publishes them and calls the host's `refreshed`.
        `recompute_kv`: whether the host recomputes the KV cache of running requests; for the record.
        """
        self._recompute_kv = recompute_kv
        self._refresh_begun = self.published != self.cached
        self._refreshing = {index for index, rank in enumerate(self.ranks) if rank.phase is Phase.ACTIVE}
        for index in sorted(self._refreshing):
            # One that still takes an earlier version takes this one after it.
            if self.ranks[index].busy is None:
                self._begin_refresh(index)
        self._publish_if_refreshed()

    def _begin_refresh(self, index: int) -> None:
        operation = self._perform(index, REFRESH, self.cached)
        self._record.emit(rec.SyncStarted(self._sync_id(operation), self.cached, (index,), REFRESH, self._recompute_kv))

    def performed(self, operation: Operation, ok: bool, loaded: int | None = None) -> None:
        """The host has finished an operation; one that was given up meanwhile is ignored.

        loaded: the version that a sync or refresh brought, where that may be newer than the one it was begun with.
        """
        rank = self.ranks[operation.rank]
        if rank.busy != operation:
            return
        if loaded is not None and loaded > operation.version >= 0:
            operation = operation._replace(version=loaded)
        rank.busy = None
        command, rank.doing = rank.doing, None
        if operation.kind == REFRESH:
            self._after_refresh(rank, operation, ok)
        elif command is not None:
            self._after_command(rank, command, operation, ok)
        following, rank.waiting = rank.waiting, None
        if following is not None and rank.busy is None:
            self._begin(rank, following)
        if operation.kind == REFRESH:
            self._go_on_refreshing(operation.rank)

    def rank_broken(self, index: int) -> None:
        """A serving rank makes no progress or answers no more: it takes no further request, and its
        failure is reported to the scheduler.
        """
        rank = self.ranks[index]
        if rank.phase is Phase.ACTIVE and not rank.broken:
            self._unroute(rank, index)
            rank.phase, rank.broken = Phase.READY, True
            self.send_status()

    def rank_ended(self, index: int) -> None:
        """The processes of a rank were ended from outside; it is asleep with nothing loaded."""
        rank = self.ranks[index]
        if rank.phase is Phase.ACTIVE:
            self._unroute(rank, index)
        self._refreshing.discard(index)
        self.ranks[index] = LocalRank(epoch=rank.epoch, newest=rank.newest, over=rank.epoch)
        self._publish_if_refreshed()
        self.send_status()

    def _take_rank_command(self, rank: LocalRank, command: Command) -> None:
        if command.epoch < rank.epoch:
            self._answer(
                command,
                CommandOutcome.REFUSED,
                detail=f"epoch {command.epoch} of rank {command.rank} is over, it is at {rank.epoch}",
            )
        elif command.order < rank.newest:
            # Overtaken on the wire by a later command, which has been obeyed; obeying this one now would undo it.
            self._answer(command, CommandOutcome.REFUSED, detail=f"a later command for rank {command.rank} came first")
        elif rank.doing is not None and rank.doing.command == command.command:
            return
        elif rank.busy is not None:
            rank.newest, rank.waiting = command.order, command
        else:
            self._begin(rank, command)

    def _begin(self, rank: LocalRank, command: Command) -> None:
        rank.epoch, rank.newest = max(rank.epoch, command.epoch), max(rank.newest, command.order)
        rank.doing = None
        begin = {
            Verb.DRAIN: self._drain,
            Verb.SLEEP: self._sleep,
            Verb.WAKE: self._wake,
            Verb.SYNC: self._sync,
            Verb.PUBLISH: self._publish_rank,
            Verb.ROUTE: self._route,
        }.get(command.verb)
        if begin is None:
            self._answer(command, CommandOutcome.REFUSED, detail=f"{command.verb.value} is not for an agent")
        else:
            begin(rank, command)

    def _drain(self, rank: LocalRank, command: Command) -> None:
        if rank.phase is Phase.ACTIVE or rank.broken:
            if rank.phase is Phase.ACTIVE:
                self._unroute(rank, command.rank)
            rank.phase = Phase.DRAINING
            self._perform(command.rank, Verb.DRAIN.value, -1, command)
            return
        if rank.phase is Phase.ASLEEP:
            # Its wake was lost or comes later; the lease is over all the same.
            rank.over = command.epoch
        else:
            rank.phase = Phase.DRAINING
        self._answer(command, CommandOutcome.DONE)

    def _sleep(self, rank: LocalRank, command: Command) -> None:
        if rank.phase is Phase.ASLEEP:
            rank.over = command.epoch
            self._answer(command, CommandOutcome.DONE)
        elif rank.phase in (Phase.DRAINING, Phase.SLEEPING):
            rank.phase = Phase.SLEEPING
            self._perform(command.rank, Verb.SLEEP.value, -1, command)
        else:
            refusal = f"rank {command.rank} is {rank.phase.value}; drain it before it sleeps"
            self._answer(command, CommandOutcome.REFUSED, detail=refusal)

    def _wake(self, rank: LocalRank, command: Command) -> None:
        if rank.phase is Phase.ASLEEP and command.epoch <= rank.over:
            # A scheduler that lost the end of its log may ask for a lease that has ended; its GPUs may be somebody
            # else's by now.
            self._answer(
                command,
                CommandOutcome.REFUSED,
                detail=f"the lease of epoch {command.epoch} is over; rank {command.rank} slept since",
            )
        elif rank.phase is Phase.ASLEEP or (rank.phase is Phase.WAKING and not rank.resident):
            if rank.phase is Phase.ASLEEP:
                self._record.emit(MemoryTaken(f"rank {command.rank}", self.topology.ranks[command.rank]))
            rank.phase, rank.broken = Phase.WAKING, False
            self._perform(command.rank, Verb.WAKE.value, -1, command)
        elif rank.phase in (Phase.DRAINING, Phase.SLEEPING):
            self._answer(
                command,
                CommandOutcome.REFUSED,
                detail=f"rank {command.rank} is {rank.phase.value}; it has to be asleep before it wakes",
            )
        else:
            self._answer(command, CommandOutcome.DONE)

    def _sync(self, rank: LocalRank, command: Command) -> None:
        if rank.phase not in (Phase.WAKING, Phase.SYNCING, Phase.READY) or not rank.resident:
            self._answer(
                command,
                CommandOutcome.REFUSED,
                detail=f"rank {command.rank} is {rank.phase.value}; only a rank that woke is synced",
            )
            return
        rank.phase = Phase.SYNCING
        operation = self._perform(command.rank, Verb.SYNC.value, self.cached, command)
        self._record.emit(rec.SyncStarted(self._sync_id(operation), self.cached, (command.rank,), "wake"))

    def _publish_rank(self, rank: LocalRank, command: Command) -> None:
        if rank.phase is not Phase.READY:
            self._answer(
                command,
                CommandOutcome.REFUSED,
                detail=f"rank {command.rank} is {rank.phase.value}; sync it before it is published",
            )
        elif rank.version < self.cached:
            self._answer(command, CommandOutcome.STALE, rank.version)
        elif rank.version > self.published:
            # Its weights are newer than what is out: the answer waits for the publication that the refresh in progress
            # ends with.
            rank.doing = command
        else:
            self._record.emit(rec.VersionPublished(rank.version, (command.rank,)))
            self._answer(command, CommandOutcome.DONE, rank.version)

    def _route(self, rank: LocalRank, command: Command) -> None:
        if rank.phase is Phase.ACTIVE:
            self._answer(command, CommandOutcome.DONE, rank.version)
        elif rank.phase is not Phase.READY:
            self._answer(
                command,
                CommandOutcome.REFUSED,
                detail=f"rank {command.rank} is {rank.phase.value}; sync and publish before it is routed",
            )
        elif rank.version != self.published or rank.version != self.cached:
            # Routed now, it would miss the refresh that is under way and serve the old weights after it.
            self._answer(command, CommandOutcome.STALE, rank.version)
        else:
            rank.phase = Phase.ACTIVE
            self.generation += 1
            self._record.emit(rec.ShardRouted(command.rank, self.generation, rank.version))
            self._answer(command, CommandOutcome.DONE, rank.version)
            self._host.routing_changed(command.rank, True)

    def _after_command(self, rank: LocalRank, command: Command, operation: Operation, ok: bool) -> None:
        index = command.rank
        if command.verb is Verb.SYNC:
            outcome = "done" if ok else "failed"
            self._record.emit(
                rec.SyncFinished(
                    self._sync_id(operation),
                    operation.version,
                    outcome,
                    checksums={str(index): f"v{operation.version}"},
                )
            )
        if not ok:
            self._answer(command, CommandOutcome.FAILED, detail=f"{operation.kind} of rank {index} failed")
            return
        if command.verb is Verb.SLEEP:
            rank.phase, rank.version, rank.broken, rank.resident, rank.over = Phase.ASLEEP, -1, False, False, rank.epoch
            self._record.emit(rec.ShardSlept(index))
            self._record.emit(MemoryFreed(f"rank {index}", self.topology.ranks[index]))
        elif command.verb is Verb.WAKE:
            rank.resident = True
            self._record.emit(rec.ShardWoken(index))
        elif command.verb is Verb.SYNC:
            rank.phase, rank.version = Phase.READY, operation.version
        self._answer(command, CommandOutcome.DONE, rank.version)

    def _after_refresh(self, rank: LocalRank, operation: Operation, ok: bool) -> None:
        outcome = "done" if ok else "failed"
        version = operation.version
        self._record.emit(
            rec.SyncFinished(self._sync_id(operation), version, outcome, checksums={str(operation.rank): f"v{version}"})
        )
        if ok:
            rank.version = version
        else:
            self.rank_broken(operation.rank)

    def _go_on_refreshing(self, index: int) -> None:
        rank = self.ranks[index]
        if (
            index in self._refreshing
            and rank.phase is Phase.ACTIVE
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
        active = tuple(i for i, r in enumerate(self.ranks) if r.phase is Phase.ACTIVE and r.version == self.published)
        self._record.emit(rec.VersionPublished(self.published, active))
        for rank in self.ranks:
            if rank.busy is None and rank.doing is not None and rank.doing.verb is Verb.PUBLISH:
                command, rank.doing = rank.doing, None
                self._publish_rank(rank, command)
        self._host.refreshed(self.published)

    def _unroute(self, rank: LocalRank, index: int) -> None:
        # Recorded once it is so: a request that was handed over before is in the record before.
        self._host.routing_changed(index, False)
        self.generation += 1
        self._record.emit(rec.ShardUnrouted(index, self.generation))

    def _perform(self, index: int, kind: str, version: int, command: Command | None = None) -> Operation:
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
        if outcome is CommandOutcome.REFUSED:
            logger.info(
                "event=refused command=%s verb=%s pipeline=%s reason=%s",
                command.command,
                command.verb.value,
                command.pipeline,
                detail,
            )
        self._host.answer(answer)

    def _sync_id(self, operation: Operation) -> str:
        return f"{self.topology.pipeline}.{self.incarnation}.{operation.number}"

"""A pipeline's side of time-sharing: the one place that knows what its ranks really are, and obeys or refuses the scheduler.

Commands are idempotent: a repeated one is answered from memory, one of a past epoch or term is not obeyed, and one for a rank that is busy waits its turn.
Orders that lose data or mix weights are impossible here whoever asks: a rank is routed only with the published weights, and training GPUs are
given back only after the new version is out. What takes time is done by a `Host`, which reports back through `performed`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from nemo_rl.time_sharing.agent_parts import REFRESH, Host, LocalHold, LocalRank, Operation, ProtocolError
from nemo_rl.time_sharing.events import MemoryFreed, MemoryTaken
from nemo_rl.time_sharing.topology import Topology
from nemo_rl.time_sharing.types import Answer, Command, Demand, GivenBack, Held, Outcome, Phase, Priority, Reply, Status, Verb, Want
from nemo_rl.utils import record_events as rec
from nemo_rl.utils.record import Record

logger = logging.getLogger(__name__)

_MEMORY = 4096
_PROGRESS_STEPS = 50


class Agent:
    """The state machine. `version` is the weight version that the pipeline starts with (0, or that of its checkpoint)."""

    def __init__(self, topology: Topology, incarnation: int, host: Host, record: Record, *, version: int = 0, request_s: float = 86400.0) -> None:
        self.topology, self.incarnation = topology, incarnation
        self.ranks = [LocalRank() for _ in topology.ranks]
        self.holds: dict[str, LocalHold] = {}
        self.wants: dict[str, Want] = {}
        self.demand = Demand()
        self.cached = self.published = version
        self.generation = 0
        self.leaving = False
        self._host, self._record, self._request_s = host, record, request_s
        self._given_back: dict[str, GivenBack] = {}
        self._answers: OrderedDict[str, Answer] = OrderedDict()
        self._refreshing: set[int] = set()
        self._term = self._seq = self._operations = self._requests = 0
        self._bucket = -1
        self._dismissed = self._held_back = self._unsaid = False

    # What the pipeline says.

    def want(self, cluster: str, priority: Priority, step: int, now: float) -> int:
        """Asks for all GPUs of a fixed cluster, or for another priority of one that is held. Returns the request's number."""
        if cluster not in self.topology.clusters or priority is Priority.GENERATION:
            raise ProtocolError(f"{self.topology.pipeline}: {cluster!r} at {priority.name} cannot be requested; registered: {sorted(self.topology.clusters)}")
        if self.leaving or cluster in self.wants:
            raise ProtocolError(
                f"{self.topology.pipeline}: {cluster} " + ("is requested already" if cluster in self.wants else "cannot be requested while leaving")
            )
        held = self.holds.get(cluster)
        if held is not None and held.priority is priority:
            raise ProtocolError(f"{self.topology.pipeline}: {cluster} is already held for {priority.name}; release it before asking again")
        gpus = set(self.topology.clusters[cluster].gpus)
        shared = next((name for name, other in self.holds.items() if name != cluster and gpus.intersection(other.gpus)), None)
        if shared is not None:
            raise ProtocolError(f"{self.topology.pipeline}: {cluster} lies on GPUs that {shared} holds; release {shared} before asking, or it waits for itself")
        self._requests += 1
        self.wants[cluster] = Want(cluster, priority, self._requests, step)
        self._record.emit(rec.WaitBegun(self._wait_id(self._requests), f"{cluster} for {priority.name} of step {step}", now + self._request_s))
        self.send_status()
        return self._requests

    def withdraw(self, cluster: str) -> None:
        """Takes a request back; a grant that crosses it is refused."""
        want = self.wants.pop(cluster, None)
        if want is not None:
            self._record.emit(rec.WaitEnded(self._wait_id(want.request), "cancelled"))
            self.send_status()

    def release(self, cluster: str) -> None:
        """Gives a fixed cluster back. Raises ProtocolError when new weights were built on it and are not published yet."""
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
            raise ProtocolError(f"{self.topology.pipeline}: the cache of version {version} must be built while the training GPUs are held")
        if version <= self.cached:
            raise ProtocolError(f"{self.topology.pipeline}: cache version {version} does not follow {self.cached}")
        self.cached = version

    def refresh(self) -> None:
        """Brings the cached weights to every rank that is awake and serving, then publishes; the host hears `refreshed`."""
        self._refreshing = {index for index, rank in enumerate(self.ranks) if rank.phase is Phase.ACTIVE and rank.busy is None}
        for index in sorted(self._refreshing):
            operation = self._perform(index, REFRESH, self.cached)
            self._record.emit(rec.SyncStarted(self._sync_id(operation), self.cached, (index,), REFRESH))
        self._publish_if_refreshed()

    def begin_progress(self, target: int, done: int = 0, unit: int = 1) -> None:
        """Generation of a new batch is waited for: `target` units of `unit` samples, `done` of them buffered already."""
        if target < 0 or done < 0 or unit < 1:
            raise ProtocolError(
                f"{self.topology.pipeline}: progress target={target} done={done} unit={unit}; counts cannot be negative and a unit is at least 1 sample"
            )
        self.demand = Demand(target, min(done, target), unit, self.demand.seq + 1)
        self._bucket = self._progress_bucket()
        self.send_status()

    def report_progress(self, done: int) -> None:
        """`done` units of the batch are there. Sent only when another 2 % are done."""
        if done < self.demand.done:
            raise ProtocolError(f"{self.topology.pipeline}: progress went from {self.demand.done} back to {done}; begin a new batch instead")
        self.demand = Demand(self.demand.target, min(done, self.demand.target), self.demand.unit, self.demand.seq + 1)
        if self._progress_bucket() != self._bucket:
            self._bucket = self._progress_bucket()
            self.send_status()

    def end_progress(self) -> None:
        """Nobody waits for generation any more."""
        self.demand = Demand(0, 0, 1, self.demand.seq + 1)
        self.send_status()

    def leave(self) -> None:
        """The pipeline is done: its ranks will be put to sleep, then it is dismissed."""
        self.leaving = True
        self.demand = Demand(0, 0, 1, self.demand.seq + 1)
        for cluster in list(self.wants):
            self.withdraw(cluster)
        self.send_status()

    @contextmanager
    def one_status(self) -> Iterator[None]:
        """Says what is done inside in a single status, so that GPUs given back and asked for in one breath are not given away between."""
        self._held_back, self._unsaid = True, False
        try:
            yield
        finally:
            self._held_back = False
            if self._unsaid:
                self.send_status()

    def send_status(self) -> None:
        """Says everything there is to say; also the heartbeat."""
        if self._held_back:
            self._unsaid = True
            return
        self._seq += 1
        holds = tuple(Held(cluster, held.epoch, held.priority) for cluster, held in self.holds.items())
        awake = tuple((i, r.epoch) for i, r in enumerate(self.ranks) if r.phase is not Phase.ASLEEP)
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
                broken,
                self.leaving,
                self._term,
            )
        )

    # What the scheduler says.

    def heard(self, reply: Reply) -> None:
        """Takes the scheduler's reply to a status."""
        if reply.incarnation != self.incarnation or self._dismissed:
            return
        if not reply.registered:
            self._dismissed = True
            self._host.dismissed(self.leaving)
        elif reply.term > self._term:
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
            self._answer(command, Outcome.REFUSED, detail=f"there is no rank {command.rank}; ranks are 0..{len(self.ranks) - 1}")
        else:
            self._take_rank_command(self.ranks[command.rank], command)

    def performed(self, operation: Operation, ok: bool) -> None:
        """The host has finished an operation; one that was given up meanwhile is ignored."""
        rank = self.ranks[operation.rank]
        if rank.busy != operation:
            return
        rank.busy = None
        command, rank.doing = rank.doing, None
        if operation.kind == REFRESH:
            self._after_refresh(rank, operation, ok)
        elif command is not None:
            self._after_command(rank, command, operation, ok)
        following, rank.waiting = rank.waiting, None
        if following is not None and rank.busy is None:
            self._begin(rank, following)

    def rank_broken(self, index: int) -> None:
        """A serving rank makes no progress or answers no more: it takes no further request, and the scheduler is told."""
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

    # How it is done.

    def _take_grant(self, command: Command) -> None:
        held = self.holds.get(command.cluster)
        want = self.wants.get(command.cluster)
        back = self._given_back.get(command.cluster)
        if held is None and (want is None or want.request != command.request or (back is not None and command.epoch <= back.epoch)):
            self._answer(command, Outcome.REFUSED, detail=f"{command.cluster} is not wanted (request {command.request})")
            return
        if held is not None and held.epoch != command.epoch:
            self._answer(command, Outcome.REFUSED, detail=f"{command.cluster} is held under epoch {held.epoch}")
            return
        asked = want is not None and want.request == command.request
        if held is not None and held.priority is command.priority and not asked:
            self._answer(command, Outcome.DONE)
            return
        if want is not None and asked:
            del self.wants[command.cluster]
            self._record.emit(rec.WaitEnded(self._wait_id(want.request)))
        if held is None:
            self._record.emit(MemoryTaken(command.cluster, command.gpus))
        self.holds[command.cluster] = LocalHold(command.epoch, command.gpus, command.priority, command.step)
        self._answer(command, Outcome.DONE)
        self.send_status()
        self._host.granted(command.cluster, command.priority, command.step)

    def _take_rank_command(self, rank: LocalRank, command: Command) -> None:
        if command.epoch < rank.epoch:
            self._answer(command, Outcome.REFUSED, detail=f"epoch {command.epoch} of rank {command.rank} is over, it is at {rank.epoch}")
        elif command.order < rank.newest:
            # Overtaken on the wire by a later command, which has been obeyed; obeying this one now would undo it.
            self._answer(command, Outcome.REFUSED, detail=f"a later command for rank {command.rank} came first")
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
            self._answer(command, Outcome.REFUSED, detail=f"{command.verb.value} is not for an agent")
        else:
            begin(rank, command)

    def _drain(self, rank: LocalRank, command: Command) -> None:
        if rank.phase is Phase.ACTIVE or rank.broken:
            if rank.phase is Phase.ACTIVE:
                self._unroute(rank, command.rank)
            rank.phase = Phase.DRAINING
            self._perform(command.rank, Verb.DRAIN.value, -1, command)
            return
        if rank.phase is not Phase.ASLEEP:
            rank.phase = Phase.DRAINING
        self._answer(command, Outcome.DONE)

    def _sleep(self, rank: LocalRank, command: Command) -> None:
        if rank.phase is Phase.ASLEEP:
            self._answer(command, Outcome.DONE)
        elif rank.phase in (Phase.DRAINING, Phase.SLEEPING):
            rank.phase = Phase.SLEEPING
            self._perform(command.rank, Verb.SLEEP.value, -1, command)
        else:
            self._answer(command, Outcome.REFUSED, detail=f"rank {command.rank} is {rank.phase.value}; drain it before it sleeps")

    def _wake(self, rank: LocalRank, command: Command) -> None:
        if rank.phase is Phase.ASLEEP and command.epoch <= rank.over:
            # A scheduler that lost the end of its log may ask for a lease that has ended; its GPUs may be somebody else's by now.
            self._answer(command, Outcome.REFUSED, detail=f"the lease of epoch {command.epoch} is over; rank {command.rank} slept since")
        elif rank.phase is Phase.ASLEEP or (rank.phase is Phase.WAKING and not rank.resident):
            if rank.phase is Phase.ASLEEP:
                self._record.emit(MemoryTaken(f"rank {command.rank}", self.topology.ranks[command.rank]))
            rank.phase, rank.broken = Phase.WAKING, False
            self._perform(command.rank, Verb.WAKE.value, -1, command)
        elif rank.phase in (Phase.DRAINING, Phase.SLEEPING):
            self._answer(command, Outcome.REFUSED, detail=f"rank {command.rank} is {rank.phase.value}; it has to be asleep before it wakes")
        else:
            self._answer(command, Outcome.DONE)

    def _sync(self, rank: LocalRank, command: Command) -> None:
        if rank.phase not in (Phase.WAKING, Phase.SYNCING, Phase.READY) or not rank.resident:
            self._answer(command, Outcome.REFUSED, detail=f"rank {command.rank} is {rank.phase.value}; only a rank that woke is synced")
            return
        rank.phase = Phase.SYNCING
        operation = self._perform(command.rank, Verb.SYNC.value, self.cached, command)
        self._record.emit(rec.SyncStarted(self._sync_id(operation), self.cached, (command.rank,), "wake"))

    def _publish_rank(self, rank: LocalRank, command: Command) -> None:
        if rank.phase is not Phase.READY:
            self._answer(command, Outcome.REFUSED, detail=f"rank {command.rank} is {rank.phase.value}; sync it before it is published")
        elif rank.version < self.cached:
            self._answer(command, Outcome.STALE, rank.version)
        elif rank.version > self.published:
            # Its weights are newer than what is out: the answer waits for the publication that the refresh in progress ends with.
            rank.doing = command
        else:
            self._record.emit(rec.VersionPublished(rank.version, (command.rank,)))
            self._answer(command, Outcome.DONE, rank.version)

    def _route(self, rank: LocalRank, command: Command) -> None:
        if rank.phase is Phase.ACTIVE:
            self._answer(command, Outcome.DONE, rank.version)
        elif rank.phase is not Phase.READY:
            self._answer(command, Outcome.REFUSED, detail=f"rank {command.rank} is {rank.phase.value}; sync and publish before it is routed")
        elif rank.version != self.published or rank.version != self.cached:
            # Routed now, it would miss the refresh that is under way and serve the old weights after it.
            self._answer(command, Outcome.STALE, rank.version)
        else:
            rank.phase = Phase.ACTIVE
            self.generation += 1
            self._record.emit(rec.ShardRouted(command.rank, self.generation, rank.version))
            self._answer(command, Outcome.DONE, rank.version)
            self._host.routing_changed(command.rank, True)

    def _after_command(self, rank: LocalRank, command: Command, operation: Operation, ok: bool) -> None:
        index = command.rank
        if command.verb is Verb.SYNC:
            outcome = "done" if ok else "failed"
            self._record.emit(rec.SyncFinished(self._sync_id(operation), operation.version, outcome, checksums={str(index): f"v{operation.version}"}))
        if not ok:
            self._answer(command, Outcome.FAILED, detail=f"{operation.kind} of rank {index} failed")
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
        self._answer(command, Outcome.DONE, rank.version)

    def _after_refresh(self, rank: LocalRank, operation: Operation, ok: bool) -> None:
        outcome = "done" if ok else "failed"
        version = operation.version
        self._record.emit(rec.SyncFinished(self._sync_id(operation), version, outcome, checksums={str(operation.rank): f"v{version}"}))
        if ok:
            rank.version = version
        else:
            self.rank_broken(operation.rank)
        self._refreshing.discard(operation.rank)
        self._publish_if_refreshed()

    def _publish_if_refreshed(self) -> None:
        if self._refreshing or self.published == self.cached:
            return
        self.published = self.cached
        active = tuple(i for i, r in enumerate(self.ranks) if r.phase is Phase.ACTIVE and r.version == self.published)
        self._record.emit(rec.VersionPublished(self.published, active))
        for rank in self.ranks:
            if rank.busy is None and rank.doing is not None and rank.doing.verb is Verb.PUBLISH:
                command, rank.doing = rank.doing, None
                self._publish_rank(rank, command)
        self._host.refreshed(self.published)

    def _unroute(self, rank: LocalRank, index: int) -> None:
        self.generation += 1
        self._record.emit(rec.ShardUnrouted(index, self.generation))
        self._host.routing_changed(index, False)

    def _perform(self, index: int, kind: str, version: int, command: Command | None = None) -> Operation:
        self._operations += 1
        operation = Operation(self._operations, kind, index, version)
        self.ranks[index].busy, self.ranks[index].doing = operation, command
        self._host.perform(operation)
        return operation

    def _answer(self, command: Command, outcome: Outcome, version: int = -1, detail: str = "") -> None:
        self._seq += 1
        answer = Answer(command.command, command.pipeline, self.incarnation, outcome, version, detail, self._seq)
        self._answers[command.command] = answer
        if len(self._answers) > _MEMORY:
            self._answers.popitem(last=False)
        if outcome is Outcome.REFUSED:
            logger.info("event=refused command=%s verb=%s pipeline=%s reason=%s", command.command, command.verb.value, command.pipeline, detail)
        self._host.answer(answer)

    def _progress_bucket(self) -> int:
        return _PROGRESS_STEPS if self.demand.target == 0 else _PROGRESS_STEPS * self.demand.done // self.demand.target

    def _wait_id(self, request: int) -> str:
        return f"{self.topology.pipeline}.{self.incarnation}.{request}"

    def _sync_id(self, operation: Operation) -> str:
        return f"{self.topology.pipeline}.{self.incarnation}.{operation.number}"

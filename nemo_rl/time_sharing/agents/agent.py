"""The pipeline agent: keeps the true state of its ranks, and obeys or refuses the scheduler's commands.

Commands are idempotent: a repeated one is answered from memory, one of a past epoch or term is refused, and one for a
busy rank waits its turn. Orders that lose data or mix weights are refused: a rank is routed only with the published
weights (`agent_ranks`), and training GPUs are given back only after the new version is published. Slow operations are
carried out by a `Host`, which reports back through `performed`.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from operator import index

from nemo_rl.time_sharing.agents.agent_ranks import Host, LocalHold, LocalPhase, ProtocolError, RankKeeper
from nemo_rl.time_sharing.log.events import MemoryFreed, MemoryTaken
from nemo_rl.time_sharing.protocol.topology import Topology
from nemo_rl.time_sharing.protocol.types import (
    Command,
    CommandOutcome,
    Demand,
    EndedRequest,
    GivenBack,
    Held,
    Priority,
    Reply,
    Status,
    Verb,
    Want,
)
from nemo_rl.time_sharing.protocol.wellformed import MAX_COUNT, cannot_be_requested, is_whole, shown
from nemo_rl.utils import record_events as rec
from nemo_rl.utils.record import Record

logger = logging.getLogger(__name__)

_PROGRESS_STEPS = 50


class Agent(RankKeeper):
    """The agent's state machine: ranks and weights (`RankKeeper`), clusters held and requested, and statuses.

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
        super().__init__(topology, incarnation, host, record, version)
        self.holds: dict[str, LocalHold] = {}
        self.wants: dict[str, Want] = {}
        self.demand = Demand()
        self.leaving = self.builds = False
        self._request_s = request_s
        self._given_back: dict[str, GivenBack] = {}
        self._term = self._requests = 0
        self._bucket = -1
        self._rank_batch = 0
        self._dismissed = self._held_back = self._unsaid = False
        self._last_refused: tuple[str, ...] = ()

    # Calls of the pipeline.

    def want(self, cluster: str, priority: Priority, step: int, now: float) -> int:
        """Asks for all GPUs of a fixed cluster, or for another priority of one that is held. Returns the request's
        number. Raises ProtocolError for what cannot be asked for: generation is no request but demand
        (`begin_progress`).
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

    def begin_progress(self, target: int, done: int = 0, unit: int = 1) -> None:
        """Opens a batch of `target` units of `unit` samples, `done` of them buffered already. Raises ProtocolError for
        a malformed count.
        """
        target, done, unit = (
            self._count("target", target),
            self._count("done", done),
            self._count("unit", unit, least=1),
        )
        self._set_demand(target, done, unit)
        self._bucket = self._progress_bucket()
        self.send_status()

    def report_progress(self, done: int) -> None:
        """`done` units of the batch are there. Sent only when another 2 % are done."""
        done = self._count("done", done)
        if done < self.demand.done:
            raise ProtocolError(
                f"{self.topology.pipeline}: progress went from {self.demand.done} back to {done}; begin a "
                "new batch instead"
            )
        self._set_demand(self.demand.target, done, self.demand.unit)
        if self._progress_bucket() != self._bucket:
            self._bucket = self._progress_bucket()
            self.send_status()

    def end_progress(self) -> None:
        """Ends the demand for generation."""
        self._set_demand(0, 0, 1)
        self.send_status()

    def _set_demand(self, target: int, done: int, unit: int) -> None:
        self.demand = Demand(target, min(done, target), unit, self.demand.seq + 1, self._rank_batch)

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
        self._set_demand(0, 0, 1)
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
            refusal = f"there is no rank {command.rank}; ranks are 0..{len(self.ranks) - 1}"
            self._answer(command, CommandOutcome.REFUSED, detail=refusal)
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
            count = int(index(value))
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
            self._answer(
                command, CommandOutcome.REFUSED, detail=f"{command.cluster} is not wanted (request {command.request})"
            )
            return
        if held is not None and held.epoch != command.epoch:
            self._answer(command, CommandOutcome.REFUSED, detail=f"{command.cluster} is held under epoch {held.epoch}")
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
        self.holds[command.cluster] = LocalHold(command.epoch, command.gpus, command.priority, command.step)
        self._answer(command, CommandOutcome.DONE)
        self.send_status()
        self._host.granted(command.cluster, command.priority, command.step)

    def _progress_bucket(self) -> int:
        return _PROGRESS_STEPS if self.demand.target == 0 else _PROGRESS_STEPS * self.demand.done // self.demand.target

    def _wait_id(self, request: int) -> str:
        return f"{self.topology.pipeline}.{self.incarnation}.{request}"

"""The scheduler as a Ray actor: it carries messages to the scheduler's core and does nothing else.

Goes on from its log when Ray restarts it. Agents are named actors, so it finds them again. Imports Ray inside
functions only, as importing this module must start nothing and need nothing.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from nemo_rl.config.errors import UserError
from nemo_rl.time_sharing.agents.ray_reaper import Reaper, agent_actor_name, agent_namespace
from nemo_rl.time_sharing.log import log_end
from nemo_rl.time_sharing.log.events import EVERYTHING, MemoryFreed, PoolOpened, UserActed
from nemo_rl.time_sharing.log.segments import SEGMENT_LINES, SegmentedLog, newest_segment, saved
from nemo_rl.time_sharing.log.state import StateSaved
from nemo_rl.time_sharing.protocol.quotas import QuotaNode
from nemo_rl.time_sharing.protocol.topology import Pool, Topology
from nemo_rl.time_sharing.protocol.types import Answer, Command, CommandOutcome, Limits, Reply, Status, Verb
from nemo_rl.time_sharing.scheduling.liveness import SteadyClock
from nemo_rl.time_sharing.scheduling.scheduler import Scheduler
from nemo_rl.utils.record import RecordError

logger = logging.getLogger(__name__)

STOP_S = 30.0
_TICK_S = 0.05
_TICK_FAILURES = 5
_AGAIN_S = 2.0


class SchedulerStopped(UserError, RuntimeError):
    """The scheduler has closed its log and takes nothing more; the next `start_scheduler` goes on from the log."""


class SchedulerActor:
    """The scheduler behind one lock, with a thread for its timers and one pool for ending processes."""

    def __init__(
        self,
        log_dir: str,
        nodes: int,
        gpus_per_node: int,
        limits: Limits | None = None,
        segment_lines: int = SEGMENT_LINES,
        slots_per_gpu: int = 1,
        away: int = 0,
    ) -> None:
        with restarting("scheduler", log_dir, OSError, RecordError):
            self._begin(log_dir, Pool(nodes, gpus_per_node, slots_per_gpu), limits or Limits(), segment_lines, away)

    def _begin(self, log_dir: str, pool: Pool, limits: Limits, segment_lines: int, away: int) -> None:
        path, newest = newest_segment(Path(log_dir) / "scheduler.jsonl")
        boot = log_end.this_boot()
        past, complete = log_end.read_log(path, boot)
        complete = complete and newest
        self._log_dir = log_dir
        now = time.time()
        # In step with the machine's clock, which the agents write their records by: the records are merged by time.
        self._clock = SteadyClock(
            start=max(now, past[-1].time if past else 0.0), reading=now, max_step_s=limits.max_tick_s
        )
        # Signed as whole only when it says that it is not: a scheduler that is killed before would be followed by one
        # that believes the signature.
        self._record = SegmentedLog(
            path, boot if complete else "", clock=lambda: self._clock.now, segment_lines=segment_lines
        )
        self._lock = threading.Lock()
        self._reaper = Reaper(Path(log_dir) / "scheduler.left")
        self._reaping: set[str] = set()
        self._reapers = ThreadPoolExecutor(max_workers=8, thread_name_prefix="reaper")
        # One thread, so that an agent hears messages in their order.
        self._messages = ThreadPoolExecutor(max_workers=1, thread_name_prefix="messages")
        self._stopped = threading.Event()
        self._unwritten: OSError | RecordError | None = None  # why the log may lack entries of the state
        self._core = Scheduler(self._record, self._send, self._clock, notify=self._notify, explains=True)
        with self._serving() as core:
            # A scheduler that was killed before it had written its first events left a log that opens no pool yet.
            if any(isinstance(entry.event, (PoolOpened, StateSaved)) for entry in past):
                core.recover(past, time.time(), complete=complete)
                for reply in core.hello():
                    self._notify(reply)
            else:
                absent = range(pool.nodes - away, pool.nodes)
                core.open(pool, limits, time.time(), complete=complete, away=absent)
        if not complete:
            self._record.sign(boot)
        self._timer = threading.Thread(target=self._tick, name="scheduler-timer", daemon=True)
        self._timer.start()

    def pid(self) -> int:
        return os.getpid()

    def serves(self) -> tuple[str, Pool]:
        """The directory of the log, and the pool."""
        with self._serving() as core:
            return self._log_dir, core.state.pool

    def register(
        self,
        pipeline: str,
        namespace: str,
        tps: Mapping[str, int],
        mappings: Mapping[str, Sequence[int]],
        options: Mapping[str, Any],
    ) -> Topology:
        """Registers and admits; see `Scheduler.register`."""
        with self._serving() as core:
            return core.register(pipeline, namespace, tps, mappings, time.time(), **options)

    def status(self, status: Status) -> Reply:
        with self._serving() as core:
            return core.status(status, time.time())

    def answer(self, answer: Answer) -> None:
        with self._serving() as core:
            core.answer(answer, time.time())

    def unregister(self, pipeline: str) -> None:
        """Ends a pipeline at once; see `Scheduler.unregister`."""
        with self._serving() as core:
            core.unregister(pipeline, time.time())

    def acted(self, user: str, action: str, subject: str, outcome: str) -> None:
        """Writes what a user of the pool's team did into the log; see `UserActed`."""
        with self._serving():
            self._record.emit(UserActed(user, action, subject, outcome))
            self._record.flush()

    def set_quotas(self, nodes: tuple[QuotaNode, ...], half_life_s: float) -> dict[str, float]:
        """See `Scheduler.set_quotas`."""
        with self._serving() as core:
            return core.set_quotas(nodes, half_life_s, time.time())

    def drain_node(self, node: int, within_s: float | None = None) -> None:
        """See `Scheduler.drain_node`."""
        with self._serving() as core:
            core.drain_node(node, time.time(), within_s)

    def node_leaves(self, node: int) -> bool:
        """See `Scheduler.node_leaves`; the engines that sleep there are ended."""
        with self._serving() as core:
            if not core.node_leaves(node, time.time()):
                return False
            units = core.state.pool.units_of([node])
            asleep = [
                (name, pipeline.incarnation, rank)
                for name, pipeline in core.state.pipelines.items()
                for rank, gpus in enumerate(pipeline.topology.ranks)
                if not units.isdisjoint(gpus)
            ]
        for name, incarnation, rank in asleep:
            if self._reaper.ends_single_ranks(name, incarnation):
                self._reaper.end(name, incarnation, rank, timeout_s=STOP_S)
                self._tell(name, incarnation, "rank_ended", rank)
        return True

    def node_comes(self, node: int) -> None:
        """See `Scheduler.node_comes`."""
        with self._serving() as core:
            core.node_comes(node, time.time())

    def wanted(self, pipeline: str) -> bool:
        """See `Scheduler.wanted`; False for one that is not registered."""
        with self._serving() as core:
            return pipeline in core.state.pipelines and core.wanted(pipeline)

    def expected_start(self, name: str, gpus: tuple[int, ...]) -> tuple[float, str]:
        """See `Scheduler.expected_start`."""
        with self._serving() as core:
            return core.expected_start(name, gpus, time.time())

    def describe(self) -> dict[str, Any]:
        """The scheduler's state for display: term, and pipelines with their ranks, holds and waits."""
        with self._serving() as core:
            state = core.state
            return {
                "term": state.term,
                "recovering": state.recovering,
                "pipelines": {
                    name: {
                        "incarnation": p.incarnation,
                        "fenced": p.fenced,
                        "leaving": p.leaving,
                        "held": {c: h.gpus for c, h in p.held.items()},
                        "ranks": {r: a.phase.value for r, a in p.awake.items()},
                        "waits": sorted(p.wants),
                    }
                    for name, p in state.pipelines.items()
                },
            }

    def stop(self) -> None:
        """Ends the timers and closes the log; call it through `stop_scheduler`, which also ends the actor."""
        with self._lock:
            if self._stopped.is_set():
                return
            self._stopped.set()
        self._timer.join(timeout=STOP_S)
        self._reapers.shutdown(wait=True, cancel_futures=True)
        self._messages.shutdown(wait=False)
        with self._lock:
            self._record.finish()

    @contextmanager
    def _serving(self) -> Generator[Scheduler]:
        with self._lock:
            if self._stopped.is_set():
                raise SchedulerStopped(
                    f"the scheduler of {self._log_dir} has been stopped; start_scheduler goes on from its log"
                )
            if self._unwritten is not None:
                raise self._unwritten
            try:
                yield self._core
            except (OSError, RecordError) as error:
                # The log may lack entries of the state: the timer ends this process.
                self._unwritten = error
                raise

    def _tick(self) -> None:
        pause, failures = _TICK_S, 0
        while not self._stopped.wait(pause):
            try:
                pause, failures = self._tick_once(), 0
            except SchedulerStopped:
                return
            except Exception as error:
                failures, pause = failures + 1, _TICK_S * 2**failures
                logger.error("scheduler=timer_failed in_a_row=%d of=%d", failures, _TICK_FAILURES, exc_info=True)
                if failures < _TICK_FAILURES and not isinstance(error, (OSError, RecordError)):
                    continue
                # Without its timer the scheduler answers but keeps no deadline, and what is not in the log has not
                # happened: Ray restarts it, and it goes on from its log.
                logger.critical("scheduler=ended reason=timer_failed log_dir=%s", self._log_dir, exc_info=True)
                os._exit(1)
                return

    def _tick_once(self) -> float:
        """Runs the scheduler's due work; returns the seconds until the next tick."""
        with self._serving() as core:
            pause = min(max(core.tick(time.time()) - self._clock.now, 0.01), 0.25)
            if self._record.due:
                self._record.begin_segment(saved(core.state))
            return pause

    def _send(self, command: Command) -> None:
        if command.verb is Verb.REAP:
            # Sent again while it is under way, it would find less than there is: Ray forgets an actor before its
            # processes are gone.
            if command.command not in self._reaping:
                self._reaping.add(command.command)
                _watched(self._reapers.submit(self._reap, command), f"reap of {command.pipeline}")
        else:
            self._tell(command.pipeline, command.incarnation, "command", command)

    def _notify(self, reply: Reply) -> None:
        self._tell(reply.pipeline, reply.incarnation, "heard", reply)

    def _tell(self, pipeline: str, incarnation: int, method: str, message: object) -> None:
        """Sends a message. Looking an agent up may take Ray a while: the lock is not held for it."""
        if not self._stopped.is_set():
            sent = self._messages.submit(_tell_agent, pipeline, incarnation, method, message)
            _watched(sent, f"message to {pipeline}")

    def _reap(self, command: Command) -> None:
        """Ends the processes of a pipeline, or of one rank, and says when they are gone."""
        try:
            only_rank = command.rank >= 0 and self._reaper.ends_single_ranks(command.pipeline, command.incarnation)
            timeout_s = max(self._core.state.limits.reap_s / 2, 1.0)
            gone = self._reaper.end(command.pipeline, command.incarnation, command.rank, timeout_s=timeout_s)
        finally:
            self._reaping.discard(command.command)
        if gone and only_rank:
            self._tell(command.pipeline, command.incarnation, "rank_ended", command.rank)
        with suppress(SchedulerStopped), self._serving() as core:
            if gone:
                core.tick(time.time())
                self._note_memory_free(command)
            outcome = CommandOutcome.DONE if gone else CommandOutcome.FAILED
            answer = Answer(command.command, command.pipeline, command.incarnation, outcome)
            core.answer(answer, time.time())

    def _note_memory_free(self, command: Command) -> None:
        """Records that the ended processes' memory is free: their quarantined GPUs, and those that the ledger books for
        them.
        """
        record, state = self._record.bind(f"{command.pipeline}/reaper"), self._core.state
        for quarantine in state.quarantines:
            *whose, rank = quarantine.whose
            if whose == [command.pipeline, command.incarnation] and command.rank in (-1, rank):
                record.emit(MemoryFreed(EVERYTHING, quarantine.gpus))
        pipeline = state.pipelines.get(command.pipeline)
        if pipeline is None or pipeline.incarnation != command.incarnation:
            return
        ranks = [command.rank] if command.rank >= 0 else sorted(pipeline.awake)
        for rank in ranks:
            record.emit(MemoryFreed(f"rank {rank}", pipeline.topology.ranks[rank]))
        if command.rank < 0:
            for cluster, held in pipeline.held.items():
                record.emit(MemoryFreed(cluster, held.gpus))


@contextmanager
def restarting(actor: str, log_dir: str, *errors: type[Exception]) -> Generator[None]:
    """Around an actor's constructor: if Ray has started the actor again, these errors make Ray do so once more, a while
    later, until they are over. Ray gives an actor up whose constructor raises, and restarts one whose process ends.
    """
    try:
        yield
    except errors:
        if not started_anew():
            raise
        logger.critical("%s=ended reason=not_restarted log_dir=%s", actor, log_dir, exc_info=True)
        time.sleep(_AGAIN_S)
        os._exit(1)


def started_anew() -> bool:
    """Whether this process is an actor that Ray started again."""
    import ray

    context = ray.get_runtime_context() if ray.is_initialized() else None
    return context is not None and context.worker.mode == ray.WORKER_MODE and context.was_current_actor_reconstructed


def _watched(work: Future[Any], what: str) -> None:
    """Logs an error of background work as one line: its caller asks again."""

    def log_error(done: Future[object]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            logger.error("%s=failed reason=%s: %s", what.replace(" ", "_"), type(error).__name__, error)

    work.add_done_callback(log_error)


def _tell_agent(pipeline: str, incarnation: int, method: str, message: object) -> None:
    """Sends a message without waiting; one to an agent that is gone is lost, which the protocol allows."""
    import ray

    try:
        agent = ray.get_actor(agent_actor_name(incarnation), namespace=agent_namespace(pipeline))
    except ValueError:
        return
    getattr(agent, method).remote(message)

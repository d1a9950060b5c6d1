"""Carries an agent in a real process: operations on threads, messages to the scheduler actor, heartbeats on a timer.

The engines are behind the `Engine` protocol; the pipeline's driver calls `acquire`, `train`-side methods and progress
through this class from its own thread. One lock guards the agent's state machine; it is never held while an engine
works or a message travels.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from nemo_rl.config.errors import UserError
from nemo_rl.time_sharing.agents.agent import Agent, Operation, RankStep, longest_s
from nemo_rl.time_sharing.protocol.topology import Topology
from nemo_rl.time_sharing.protocol.types import Answer, Command, Limits, Priority, Reply, Status, Want
from nemo_rl.utils.record import Record

if TYPE_CHECKING:
    from nemo_rl.time_sharing.agents.actors import RayLink

logger = logging.getLogger(__name__)

_LEAVE_S = 300.0


class Engine(Protocol):
    """Operations on one generation rank of a pipeline.

    Each call returns when it is done and raises EngineError if it fails; any other exception counts as EngineError.
    `load` returns the version that it loaded: the requested one, or a newer one that was built meanwhile.
    `set_routable` must not block.
    """

    def drain(self, rank: int) -> None: ...

    def sleep(self, rank: int) -> None: ...

    def wake(self, rank: int) -> None: ...

    def load(self, rank: int, version: int) -> int: ...

    def set_routable(self, rank: int, active: bool) -> None: ...


class EngineError(UserError, RuntimeError):
    """An engine could not carry out a command; the rank goes back to sleep or is ended."""


class Dismissed(RuntimeError):
    """The scheduler no longer knows this incarnation: it was fenced, and its processes are being ended."""


class RequestEnded(TimeoutError):
    """The scheduler has ended a request without a grant, because it waited longer than `request_s`; it may be asked for
    again.
    """


class AgentRuntime:
    """An agent with its threads. `closed` is set when the pipeline has left, or was fenced (`fenced` is true then), and
    `on_closed` called.
    """

    def __init__(
        self,
        topology: Topology,
        incarnation: int,
        engine: Engine,
        link: RayLink,
        record: Record,
        limits: Limits,
        *,
        version: int = 0,
        on_closed: Callable[[], None] = lambda: None,
    ) -> None:
        self.closed = threading.Event()
        self.fenced = False
        self._engine, self._link, self._limits, self._on_closed = engine, link, limits, on_closed
        self._lock = threading.RLock()
        self._deadlines: dict[Operation, float] = {}
        self._changed = threading.Condition(self._lock)
        self._granted: dict[str, Priority] = {}
        self._ended: dict[str, str] = {}
        self._refreshed = version
        self._work = ThreadPoolExecutor(max_workers=max(4, len(topology.ranks)), thread_name_prefix="agent")
        # The scheduler ends a request at request_s, and within a lease its agent has heard of it or is fenced.
        self._agent = Agent(
            topology, incarnation, self, record, version=version, request_s=limits.request_s + limits.lease_s
        )
        self._heart = threading.Thread(target=self._beat, name="agent-heartbeat", daemon=True)

    def start(self) -> None:
        """Begins heartbeats; the pipeline must be registered."""
        self._heart.start()

    # For the pipeline's driver.

    def acquire(self, cluster: str, priority: Priority, step: int, timeout_s: float) -> None:
        """Asks for a fixed cluster, or for another priority of a held one, and waits for it. Raises TimeoutError after
        timeout_s (the request is withdrawn), RequestEnded (a TimeoutError) when the scheduler gave it up before,
        ProtocolError for what cannot be asked for, Dismissed when the pipeline was fenced meanwhile.
        """
        with self._changed:
            self._granted.pop(cluster, None)
            self._agent.want(cluster, priority, step, time.time())
            if not self._wait(lambda: self._granted.get(cluster) is priority or cluster in self._ended, timeout_s):
                self._agent.withdraw(cluster)
                raise TimeoutError(
                    f"{self._agent.topology.pipeline}: {cluster} for {priority.name} of step {step} was not "
                    f"granted within {timeout_s:g} s"
                )
            if cluster in self._ended:
                what = f"{self._agent.topology.pipeline}: {cluster} for {priority.name} of step {step}"
                raise RequestEnded(f"{what} was not granted: {self._ended.pop(cluster)}")

    def begin_at(self, version: int) -> None:
        """The run begins with the weights of `version`, which the cache serves."""
        with self._lock:
            self._agent.begin_at(version)
            self._refreshed = version

    def cache_built(self, version: int) -> None:
        """The cache holds `version`; ranks woken from now on load it."""
        with self._lock:
            self._agent.cache_built(version)

    def publish(self, version: int, timeout_s: float, *, recompute_kv: bool = False) -> None:
        """Refreshes the ranks that are awake with the cache of `version`, and publishes it. Raises TimeoutError after
        timeout_s. `recompute_kv` says whether the engine has running requests recompute their keys and values.
        """
        with self._changed:
            if self._agent.cached < version:
                self._agent.cache_built(version)
            self._agent.refresh(recompute_kv=recompute_kv)
            if not self._wait(lambda: self._refreshed >= version, timeout_s):
                raise TimeoutError(
                    f"{self._agent.topology.pipeline}: version {version} did not reach the ranks that are "
                    f"awake within {timeout_s:g} s"
                )

    def release(self, cluster: str, *, target: int | None = 0, done: int = 0, unit: int = 1) -> None:
        """Gives a cluster back and sets the demand in the same status; a target of None leaves it as it is."""
        with self._lock, self._agent.one_status():
            self._agent.release(cluster)
            if target is not None:
                self._agent.set_demand(target, done, unit)

    def set_demand(self, target: int, done: int = 0, unit: int = 1) -> None:
        """See `Agent.set_demand`."""
        with self._lock:
            self._agent.set_demand(target, done, unit)

    def batch_measured(self, rank_batch: int) -> None:
        """How many samples one engine runs at once at good speed; said with the next demand."""
        with self._lock:
            self._agent.batch_measured(rank_batch)

    def builds_ahead(self) -> None:
        """The engines can be built; the scheduler may have that done ahead of their first wakes."""
        with self._lock:
            self._agent.builds_ahead()

    def rank_broken(self, rank: int) -> None:
        with self._lock:
            self._agent.rank_broken(rank)

    def rank_broken_soon(self, rank: int) -> None:
        """The same from a thread that must not wait, such as an event loop's."""
        self._work.submit(self.rank_broken, rank).add_done_callback(_log_error)

    def leave(self, timeout_s: float = _LEAVE_S) -> None:
        """Puts all ranks to sleep and ends the registration. Raises TimeoutError after timeout_s."""
        with self._lock:
            self._agent.leave()
        if not self.closed.wait(timeout_s):
            raise TimeoutError(f"{self._agent.topology.pipeline}: not dismissed within {timeout_s:g} s after leaving")

    # For the scheduler.

    def command(self, command: Command) -> None:
        with self._lock:
            self._agent.command(command)

    def heard(self, reply: Reply) -> None:
        with self._lock:
            self._agent.heard(reply)

    def rank_ended(self, rank: int) -> None:
        with self._lock:
            self._agent.rank_ended(rank)

    # For the agent.

    def perform(self, operation: Operation) -> None:
        longest = longest_s(operation.kind, self._limits, self._agent.topology.spec.drain_s)
        self._deadlines[operation] = time.monotonic() + longest
        self._work.submit(self._perform, operation).add_done_callback(_log_error)

    def answer(self, answer: Answer) -> None:
        self._link.answer(answer)

    def status(self, status: Status) -> None:
        self._link.status(status, self.heard)

    def granted(self, cluster: str, priority: Priority, step: int) -> None:
        self._granted[cluster] = priority
        self._changed.notify_all()

    def request_ended(self, want: Want, reason: str) -> None:
        self._ended[want.cluster] = reason
        self._changed.notify_all()

    def routing_changed(self, rank: int, active: bool) -> None:
        self._engine.set_routable(rank, active)

    def refreshed(self, version: int) -> None:
        self._refreshed = version
        self._changed.notify_all()

    def dismissed(self, left: bool) -> None:
        self.fenced = not left
        self.closed.set()
        self._changed.notify_all()
        self._on_closed()

    def _perform(self, operation: Operation) -> None:
        work: dict[RankStep, Callable[[], int | None]] = {
            RankStep.DRAIN: lambda: self._engine.drain(operation.rank),
            RankStep.SLEEP: lambda: self._engine.sleep(operation.rank),
            RankStep.WAKE: lambda: self._engine.wake(operation.rank),
            RankStep.SYNC: lambda: self._engine.load(operation.rank, operation.version),
            RankStep.REFRESH: lambda: self._engine.load(operation.rank, operation.version),
        }
        done, loaded = True, None
        try:
            loaded = work[operation.kind]()
        except Exception:
            # An answer that never comes would hold the GPUs of a rank that does nothing until its deadline.
            logger.exception("event=operation_failed kind=%s rank=%d", operation.kind.value, operation.rank)
            done = False
        with self._lock:
            self._deadlines.pop(operation, None)
            self._agent.performed(operation, done, loaded)

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        done = self._changed.wait_for(lambda: condition() or self.closed.is_set(), timeout_s)
        if self.closed.is_set() and not condition():
            raise Dismissed(
                f"{self._agent.topology.pipeline}: incarnation {self._agent.incarnation} is no longer registered"
            )
        return done

    def _beat(self) -> None:
        while not self.closed.wait(self._limits.heartbeat_s):
            with self._lock:
                for operation, deadline in list(self._deadlines.items()):
                    if time.monotonic() > deadline:
                        logger.error("event=operation_overdue kind=%s rank=%d", operation.kind.value, operation.rank)
                        del self._deadlines[operation]
                        self._agent.step_overdue(operation)
                self._agent.send_status()


def _log_error(done: Future[None]) -> None:
    error = done.exception()
    if error is not None:
        logger.error("event=agent_raised error=%r", error, exc_info=error)

"""GPUs of the pool for a job that is not an RL pipeline: acquire, yield when asked, release.

Such a job registers as a pipeline with generation ranks only. A rank of it that wakes is GPUs it may use; a drain is the request to
yield them, which it answers by `yielded`. The protocol, its leases and its deadlines are those of every pipeline.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from nemo_rl.time_sharing.runtime import AgentRuntime, EngineError, SchedulerLink
from nemo_rl.time_sharing.topology import Topology
from nemo_rl.time_sharing.types import Command, Limits, Reply
from nemo_rl.utils.record import Record


class ExternalJob:
    """The client. Its methods may be called from any thread; heartbeats run by themselves.

    topology: registered with `actor_infer` only. asked_to_yield: called, once per rank, when its GPUs are wanted back; they must be
    free and `yielded(rank)` called within the scheduler's drain deadline, or the job's processes are ended.
    """

    def __init__(
        self, topology: Topology, incarnation: int, link: SchedulerLink, record: Record, limits: Limits, *, asked_to_yield: Callable[[int], None]
    ) -> None:
        self._topology, self._asked = topology, asked_to_yield
        self._changed = threading.Condition()
        self._held: set[int] = set()
        self._yielded: set[int] = set()
        self._patience_s = limits.drain_s
        self._runtime = AgentRuntime(topology, incarnation, self, link, record, limits)
        self._runtime.start()

    def acquire(self, ranks: int, timeout_s: float) -> list[tuple[int, ...]]:
        """Asks for GPUs of that many ranks and waits for the first; returns the GPUs of every rank held so far. Raises TimeoutError."""
        self._say_demand(ranks)
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._held), timeout_s):
                raise TimeoutError(f"{self._topology.pipeline}: no GPUs within {timeout_s:g} s; the request stands until release()")
            return self.held()

    def held(self) -> list[tuple[int, ...]]:
        """The GPUs of each rank that may be used now."""
        return [self._topology.ranks[rank] for rank in sorted(self._held)]

    def yielded(self, rank: int) -> None:
        """The GPUs of a rank that was asked for are free."""
        with self._changed:
            self._held.discard(rank)
            self._yielded.add(rank)
            self._changed.notify_all()

    def release(self, timeout_s: float) -> None:
        """Gives everything back and ends the registration. Raises TimeoutError."""
        with self._changed:
            for rank in list(self._held):
                self._yielded.add(rank)
            self._held.clear()
            self._changed.notify_all()
        self._runtime.leave(timeout_s)

    def command(self, command: Command) -> None:
        self._runtime.command(command)

    def heard(self, reply: Reply) -> None:
        self._runtime.heard(reply)

    def _say_demand(self, ranks: int) -> None:
        self._runtime.begin_progress(ranks)

    # What the agent runs: the job's own work takes the place of an engine.

    def drain(self, rank: int) -> None:
        with self._changed:
            ask = rank in self._held
        if ask:
            self._asked(rank)
        with self._changed:
            if not self._changed.wait_for(lambda: rank in self._yielded or rank not in self._held, self._patience_s):
                raise EngineError(f"{self._topology.pipeline}: the GPUs of rank {rank} were not yielded within {self._patience_s:g} s")

    def sleep(self, rank: int) -> None:
        with self._changed:
            self._held.discard(rank)
            self._yielded.discard(rank)

    def wake(self, rank: int) -> None:
        with self._changed:
            self._yielded.discard(rank)

    def load(self, rank: int, version: int) -> None:
        """There are no weights to load."""

    def set_routable(self, rank: int, active: bool) -> None:
        with self._changed:
            if active:
                self._held.add(rank)
            self._changed.notify_all()

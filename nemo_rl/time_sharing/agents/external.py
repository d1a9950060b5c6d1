"""GPUs of the pool for a job that is not an RL pipeline: acquire, yield when asked, release.

Such a job registers as a pipeline with generation ranks only. A rank of it that wakes is GPUs it may use; a drain is
the request to yield them, which it answers by `yielded`. The protocol, its leases and its deadlines are those of every
pipeline. A rank is held from the moment it may be used until it was yielded; nothing is held by a job that was released
or fenced.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from nemo_rl.time_sharing.agents.agent import ProtocolError
from nemo_rl.time_sharing.agents.runtime import AgentRuntime, Dismissed, EngineError
from nemo_rl.time_sharing.protocol.topology import Topology
from nemo_rl.time_sharing.protocol.types import Command, Limits, Reply, is_whole, shown
from nemo_rl.utils.record import Record

if TYPE_CHECKING:
    from nemo_rl.time_sharing.agents.actors import RayLink


class ExternalJob:
    """The client. Its methods may be called from any thread; heartbeats run by themselves.

    topology: registered with `actor_infer` only. asked_to_yield: called from a thread of its own, once per rank, when
    its GPUs are wanted back; they must be free and `yielded(rank)` called within the scheduler's drain deadline, or the
    job's processes are ended. The actor around it hands on `command`, `heard` and `rank_ended`
    (examples/time_sharing/external_job.py).
    """

    def __init__(
        self,
        topology: Topology,
        incarnation: int,
        link: RayLink,
        record: Record,
        limits: Limits,
        *,
        asked_to_yield: Callable[[int], None],
    ) -> None:
        self._topology, self._incarnation, self._tell_asked = topology, incarnation, asked_to_yield
        self._changed = threading.Condition()
        self._held: set[int] = set()
        self._asked: set[int] = set()
        self._yielded: set[int] = set()
        self._released = False
        self._ranks_asked = self._open_samples = 0
        self._yield_deadline_s = max(limits.drain_s, topology.spec.drain_s)
        self._runtime = AgentRuntime(topology, incarnation, self, link, record, limits, on_closed=self._closed)
        self._runtime.start()

    @property
    def fenced(self) -> bool:
        """Whether the scheduler has fenced this incarnation; its processes on GPUs are being ended."""
        return self._runtime.fenced

    def acquire(self, ranks: int, timeout_s: float, *, at_least: int | None = None) -> list[tuple[int, ...]]:
        """Asks for the GPUs of `ranks` ranks and waits until `at_least` of them are held (all, if None); returns
        `held()`.

        The request stands until the next one or the release, also after a time-out: what is missing comes when it is
        free, and comes back after it was yielded. Asking for fewer than are held gives the rest up: they are asked for
        as soon as somebody can use them.

        Raises TimeoutError when fewer are held after timeout_s, Dismissed when the job was fenced, ProtocolError for a
        number of ranks that there cannot be and after the release.
        """
        enough = ranks if at_least is None else at_least
        whole = len(self._topology.ranks)
        if not is_whole(ranks, 1, whole) or not is_whole(enough, 1, ranks):
            asked = f"{shown(ranks)} ranks, at least {shown(enough)}"
            raise ProtocolError(
                f"{self._topology.pipeline}: asked for {asked}; it is registered with {whole}: ask for 1 to "
                f"{whole}, and at least 1 of these"
            )
        self._check_in_use()
        self._ranks_asked = ranks
        self._ask()
        with self._changed:
            self._changed.wait_for(lambda: len(self._held) >= enough or self._over, timeout_s)
            self._check_in_use()
            if len(self._held) < enough:
                raise TimeoutError(
                    f"{self._topology.pipeline}: {len(self._held)} of {enough} ranks within {timeout_s:g} s; "
                    "the request stands: "
                    f"held() shows what has come, release() gives it up"
                )
            return self.held()

    def report_open(self, samples: int) -> None:
        """Sets the number of open samples; the demand is that, and at least the ranks that were requested."""
        if samples != self._open_samples:
            self._open_samples = samples
            if self._ranks_asked and not self._over:
                self._ask()

    def _ask(self) -> None:
        self._runtime.set_demand(max(self._ranks_asked * self._topology.spec.rank_batch, self._open_samples))

    def held(self) -> list[tuple[int, ...]]:
        """The GPUs of each rank that may be used now; none after the release, or when the job was fenced."""
        with self._changed:
            return [] if self._over else [self._topology.ranks[rank] for rank in sorted(self._held)]

    def yielded(self, rank: int) -> None:
        """The GPUs of a rank that was asked for are free. Raises ProtocolError for a rank that was not asked for."""
        with self._changed:
            if rank in self._yielded or self._over:
                return
            if rank not in self._asked:
                raise ProtocolError(
                    f"{self._topology.pipeline}: rank {shown(rank)} was not asked for; asked for: "
                    f"{sorted(self._asked)}, held: {sorted(self._held)}. "
                    f"To give up more, acquire() fewer ranks, or release()"
                )
            self._held.discard(rank)
            self._yielded.add(rank)
            self._changed.notify_all()

    def withdraw(self) -> None:
        """Takes back what `acquire` asked for, until it asks again; ranks that are held stay so until they are yielded.
        A job that yields for long then does not count as waiting, and others get their turn behind it.
        """
        self._ranks_asked = 0
        if not self._over:
            self._runtime.set_demand(0)

    def release(self, timeout_s: float) -> None:
        """Gives everything back, which must be free by now, and ends the registration. Raises TimeoutError; there is
        nothing to do for a fenced job.
        """
        with self._changed:
            self._released = True
            self._held.clear()
            self._changed.notify_all()
        if not self._runtime.closed.is_set():
            self._runtime.leave(timeout_s)

    def command(self, command: Command) -> None:
        self._runtime.command(command)

    def heard(self, reply: Reply) -> None:
        self._runtime.heard(reply)

    def rank_ended(self, rank: int) -> None:
        """The scheduler had the processes of a rank ended; its GPUs are no longer the job's."""
        self.sleep(rank)
        self._runtime.rank_ended(rank)

    @property
    def _over(self) -> bool:
        return self._released or self._runtime.closed.is_set()

    def _check_in_use(self) -> None:
        if self._released:
            raise ProtocolError(
                f"{self._topology.pipeline}: was released; register it again, under an incarnation above "
                f"{self._incarnation}, to acquire more"
            )
        if self._runtime.closed.is_set():
            raise Dismissed(
                f"{self._topology.pipeline}: incarnation {self._incarnation} is no longer registered: its "
                "GPUs are no longer its own. "
                f"Register it again under a larger incarnation"
            )

    def _closed(self) -> None:
        with self._changed:
            self._held.clear()
            self._changed.notify_all()

    # Operations of the agent: the job's own work takes the place of an engine.

    def drain(self, rank: int) -> None:
        with self._changed:
            ask = rank in self._held
            if ask:
                self._asked.add(rank)
        if ask:
            self._tell_asked(rank)
        with self._changed:
            if not self._changed.wait_for(lambda: rank not in self._held, self._yield_deadline_s):
                raise EngineError(
                    f"{self._topology.pipeline}: the GPUs of rank {rank} were not yielded in "
                    f"{self._yield_deadline_s:g} s"
                )

    def sleep(self, rank: int) -> None:
        with self._changed:
            for ranks in (self._held, self._asked, self._yielded):
                ranks.discard(rank)
            self._changed.notify_all()

    def wake(self, rank: int) -> None:
        with self._changed:
            self._asked.discard(rank)
            self._yielded.discard(rank)

    def load(self, rank: int, version: int) -> int:
        """There are no weights to load."""
        return version

    def set_routable(self, rank: int, active: bool) -> None:
        with self._changed:
            if active and not self._released:
                self._held.add(rank)
            self._changed.notify_all()

"""Invariants 8 and 9: every wait ends within its deadline, and nobody starves.

Starvation is judged twice. By order: a request may be overtaken on its GPUs by at most `max_backfills` requests that are behind it in the aged queue.
By time: it is served within the bound that follows from the longest non-preemptible hold in this record (the assumption of the proof).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nemo_rl.time_sharing import events as ev
from nemo_rl.time_sharing.types import ACTOR_INFER, Phase, Priority
from nemo_rl.utils import record_events as rec
from nemo_rl.utils.record import Entry

_SLACK_S = 5.0
"""What timers may be late: ticks come at least every second, and a restarted scheduler needs a few to catch up."""
_OUTLIVED = "could not be ended"
"""Why a pipeline was unregistered whose processes may live on."""


@dataclass(slots=True)
class _Waiting:
    since: float
    key: float
    gpus: frozenset[int]
    claimed: bool = False
    overtaken: int = 0


@dataclass(slots=True)
class _Pipeline:
    gpus: dict[str, frozenset[int]] = field(default_factory=dict)
    awake: set[int] = field(default_factory=set)
    demand: int = 0
    hungry_since: float | None = None
    leaving: bool = False


class WaitChecks:
    """Watches deadlines and queues."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []
        self._limits: dict[str, float] = {}
        self._waits: dict[tuple[str, str], tuple[str, float]] = {}
        self._outlived: set[tuple[str, str]] = set()
        self._commands: dict[str, tuple[str, float]] = {}
        self._holds: dict[tuple[str, str], tuple[float, float]] = {}
        self._requests: dict[tuple[str, str], _Waiting] = {}
        self._pipelines: dict[str, _Pipeline] = {}
        self._restarted = float("-inf")
        self._longest_hold = 0.0
        self._most_pipelines = 0
        self._disturbed_s = 0.0
        self._waited: list[tuple[float, str]] = []
        self._now = self._agents_now = 0.0

    def handlers(self) -> dict[type, Callable[[Entry, Any], None]]:
        return {
            ev.PoolOpened: self._opened,
            ev.SchedulerStarted: self._started,
            ev.ClockJumped: self._jumped,
            ev.Registered: self._registered,
            ev.Unregistered: self._unregistered,
            ev.Requested: self._requested,
            ev.RequestDropped: self._dropped,
            ev.Claimed: self._claimed,
            ev.ClaimDropped: self._claim_dropped,
            ev.Granted: self._granted,
            ev.Repriced: self._repriced,
            ev.Released: self._released,
            ev.RankMoved: self._rank,
            ev.DemandReported: self._demand,
            ev.Leaving: self._leaving,
            ev.Fenced: self._fenced,
            ev.CommandSent: self._sent,
            ev.CommandEnded: self._ended,
            ev.GpusQuarantined: self._disturbed,
            ev.RankCooling: self._disturbed,
            rec.WaitBegun: self._begun,
            rec.WaitEnded: self._wait_ended,
        }

    def finish(self) -> None:
        for (source, wait), (what, deadline) in self._waits.items():
            if self._agents_now > self._effective(deadline):
                self._bad(8, f"{source} waits for {what} ({wait}), which had to end by {deadline:.1f} s and never did")
        for what, deadline in self._commands.values():
            if self._now > self._effective(deadline):
                self._bad(8, f"{what} had to end by {deadline:.1f} s and never did")
        for (pipeline, cluster), waiting in self._requests.items():
            self._waited.append((self._now - waiting.since, f"{pipeline} waits for {cluster} since {waiting.since:.1f} s"))
        for name, pipeline in self._pipelines.items():
            if pipeline.hungry_since is not None:
                self._waited.append((self._now - pipeline.hungry_since, f"{name} has had work and no rank since {pipeline.hungry_since:.1f} s"))
        bound = self._bound()
        for seconds, what in self._waited:
            if seconds > bound:
                self._bad(9, f"{what}: {seconds:.1f} s, the bound is {bound:.1f} s (longest hold {self._longest_hold:.1f} s)")

    def _bound(self) -> float:
        """docs/time_sharing_scheduler.md: everyone ahead holds once, each with one hand-over, plus the aging window, turns, and time lost to faults."""
        limit = self._limits.get
        handover = (
            limit("drain_s", 0.0) + limit("sleep_s", 0.0) + limit("reap_s", 0.0) + limit("wake_s", 0.0) + 2 * limit("sync_s", 0.0) + limit("route_s", 0.0)
        )
        ahead = 2 * self._most_pipelines + limit("max_backfills", 0.0) + 1
        aging = Priority.GENERATION * limit("aging_s", 0.0)
        return aging + ahead * (self._longest_hold + handover + limit("min_hold_s", 0.0) + limit("lease_s", 0.0)) + self._disturbed_s

    def _bad(self, invariant: int, message: str) -> None:
        self.found.append((invariant, message))

    def _effective(self, deadline: float) -> float:
        return max(deadline, self._restarted) + _SLACK_S

    def _opened(self, entry: Entry, event: ev.PoolOpened) -> None:
        self._limits = dict(event.limits)

    def _started(self, entry: Entry, event: ev.SchedulerStarted) -> None:
        self._restarted = entry.time
        self._disturbed_s += self._limits.get("lease_s", 0.0)

    def _jumped(self, entry: Entry, event: ev.ClockJumped) -> None:
        self._restarted = entry.time

    def _registered(self, entry: Entry, event: ev.Registered) -> None:
        self._pipelines[event.pipeline] = _Pipeline({cluster.name: frozenset(cluster.gpus) for cluster in event.clusters})
        self._most_pipelines = max(self._most_pipelines, len(self._pipelines))

    def _unregistered(self, entry: Entry, event: ev.Unregistered) -> None:
        self._pipelines.pop(event.pipeline, None)
        # What a pipeline's processes waited for ended with them; only one that could not be ended may still say so of itself.
        waits = [wait for wait in self._waits if wait[0].partition("/")[0] == event.pipeline]
        for wait in waits:
            del self._waits[wait]
        if event.reason == _OUTLIVED:
            self._outlived.update(waits)
        for table in (self._requests, self._holds):
            for key in [key for key in table if key[0] == event.pipeline]:
                del table[key]

    # Invariant 8.

    def _begun(self, entry: Entry, event: rec.WaitBegun) -> None:
        self._waits[entry.source, event.wait_id] = (event.what, event.deadline)

    def _wait_ended(self, entry: Entry, event: rec.WaitEnded) -> None:
        self._agents_now = max(self._agents_now, entry.time)
        key = (entry.source, event.wait_id)
        wait = self._waits.pop(key, None)
        if wait is None and key in self._outlived:
            self._outlived.remove(key)
        elif wait is None:
            self._bad(8, f"{entry.source} ends wait {event.wait_id}, which it had not begun")
        elif entry.time > self._effective(wait[1]):
            self._bad(8, f"{entry.source} waited for {wait[0]} until {entry.time:.1f} s, its deadline was {wait[1]:.1f} s")

    def _sent(self, entry: Entry, event: ev.CommandSent) -> None:
        self._now = entry.time
        where = f"rank {event.rank}" if event.rank >= 0 else event.cluster
        self._commands[event.command] = (f"{event.verb} of {where} of {event.pipeline} ({event.command})", event.deadline)

    def _ended(self, entry: Entry, event: ev.CommandEnded) -> None:
        self._now = entry.time
        command = self._commands.pop(event.command, None)
        if command is None:
            self._bad(8, f"command {event.command} ends without having been sent, or twice")
        elif entry.time > self._effective(command[1]):
            self._bad(8, f"{command[0]} ended ({event.outcome}) at {entry.time:.1f} s, its deadline was {command[1]:.1f} s")

    def _end_hold(self, pipeline: str, cluster: str, time: float) -> None:
        hold = self._holds.pop((pipeline, cluster), None)
        if hold is not None:
            self._longest_hold = max(self._longest_hold, time - hold[0])
            if time > self._effective(hold[1]):
                self._bad(8, f"{pipeline} held {cluster} until {time:.1f} s, it had to end by {hold[1]:.1f} s")

    # Invariant 9.

    def _requested(self, entry: Entry, event: ev.Requested) -> None:
        key = entry.time + event.priority * self._limits.get("aging_s", 0.0)
        self._requests[event.pipeline, event.cluster] = _Waiting(entry.time, key, self._pipelines[event.pipeline].gpus[event.cluster])

    def _dropped(self, entry: Entry, event: ev.RequestDropped) -> None:
        self._requests.pop((event.pipeline, event.cluster), None)

    def _claimed(self, entry: Entry, event: ev.Claimed) -> None:
        if event.cluster == ACTOR_INFER:
            return
        mine = self._requests.get((event.pipeline, event.cluster))
        if mine is None:
            return
        mine.claimed = True
        taken = frozenset(event.gpus)
        for (name, cluster), other in self._requests.items():
            if not other.claimed and other.key < mine.key and name != event.pipeline and other.gpus & taken:
                other.overtaken += 1
                if other.overtaken > self._limits.get("max_backfills", 0.0):
                    self._bad(9, f"{name} waits for {cluster} and is overtaken for the {other.overtaken}th time, by {event.pipeline}")

    def _claim_dropped(self, entry: Entry, event: ev.ClaimDropped) -> None:
        waiting = self._requests.get((event.pipeline, event.cluster))
        if waiting is not None and event.rank < 0:
            waiting.claimed = False

    def _granted(self, entry: Entry, event: ev.Granted) -> None:
        self._holds[event.pipeline, event.cluster] = (entry.time, event.hold_until)
        self._serve(event.pipeline, event.cluster, entry.time)

    def _repriced(self, entry: Entry, event: ev.Repriced) -> None:
        self._serve(event.pipeline, event.cluster, entry.time)

    def _serve(self, pipeline: str, cluster: str, time: float) -> None:
        waiting = self._requests.pop((pipeline, cluster), None)
        if waiting is not None:
            self._waited.append((time - waiting.since, f"{pipeline} waited for {cluster} from {waiting.since:.1f} s"))

    def _released(self, entry: Entry, event: ev.Released) -> None:
        self._end_hold(event.pipeline, event.cluster, entry.time)

    def _fenced(self, entry: Entry, event: ev.Fenced) -> None:
        name = event.pipeline
        for key in [key for key in self._holds if key[0] == name]:
            self._end_hold(*key, entry.time)
        for key in [key for key in self._requests if key[0] == name]:
            del self._requests[key]
        self._pipelines[name].leaving = True
        self._feed(name, entry.time)
        self._disturbed_s += self._limits.get("lease_s", 0.0) + self._limits.get("reap_s", 0.0)

    def _disturbed(self, entry: Entry, event: ev.GpusQuarantined | ev.RankCooling) -> None:
        self._disturbed_s += self._limits.get("quarantine_s", 0.0) + self._limits.get("reap_s", 0.0)

    def _rank(self, entry: Entry, event: ev.RankMoved) -> None:
        awake = self._pipelines[event.pipeline].awake
        if event.phase in (Phase.DRAINING, Phase.SLEEPING, Phase.FAILED, Phase.ASLEEP):
            awake.discard(event.rank)
        else:
            awake.add(event.rank)
        self._feed(event.pipeline, entry.time)

    def _demand(self, entry: Entry, event: ev.DemandReported) -> None:
        self._pipelines[event.pipeline].demand = max(event.target - event.done, 0) * event.unit
        self._feed(event.pipeline, entry.time)

    def _leaving(self, entry: Entry, event: ev.Leaving) -> None:
        name = event.pipeline
        self._pipelines[name].leaving = True
        self._feed(name, entry.time)
        for key in [key for key in self._requests if key[0] == name]:
            del self._requests[key]

    def _feed(self, name: str, time: float) -> None:
        pipeline = self._pipelines[name]
        hungry = pipeline.demand > 0 and not pipeline.awake and not pipeline.leaving
        if hungry and pipeline.hungry_since is None:
            pipeline.hungry_since = time
        elif not hungry and pipeline.hungry_since is not None:
            self._waited.append((time - pipeline.hungry_since, f"{name} had work and no rank from {pipeline.hungry_since:.1f} s"))
            pipeline.hungry_since = None

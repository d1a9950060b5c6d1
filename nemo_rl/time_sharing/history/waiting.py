"""Invariant 8: every wait, command and hold ends within its deadline, including those open at the end of the record.

Time is the clocks' (`clocks`), so a deadline that passes while nothing else of its kind happens is noticed all the
same. What trains on a node that is to leave ends by its time. A restart of the scheduler or a jump of its clock
postpones deadlines to that moment; commands and holds in a lost end of the log are not judged.
"""

from __future__ import annotations

from nemo_rl.time_sharing.history.clocks import SLACK_S, Clocks
from nemo_rl.time_sharing.history.ledger import Checks, Ledger
from nemo_rl.time_sharing.log import events as ev
from nemo_rl.utils import record_events as rec
from nemo_rl.utils.record import Entry

_OUTLIVED = ("could not be ended", "left")
"""Why a pipeline was unregistered whose processes may live on: one that left hears of it a moment later."""


class WaitChecks(Checks):
    """Watches deadlines."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger
        self._waits: dict[tuple[str, str], tuple[str, float]] = {}
        self._outlived: set[tuple[str, str]] = set()
        self._commands: dict[str, tuple[str, float]] = {}
        self._holds: dict[tuple[str, str], float] = {}
        self._restarted = float("-inf")
        self._isolated: float | None = None
        self._given_up: float | None = None
        """When an isolation was given up, as long as no pipeline has come or gone since."""
        self._drift_s = 0.0
        self._by: dict[frozenset[int], float] = {}
        """When the GPUs of nodes that are to leave have to be free."""

    def tail_lost(self, entry: Entry) -> None:
        self._commands.clear()
        self._holds.clear()

    def finish(self, clocks: Clocks, ended: bool) -> None:
        clocks.drift_s = self._drift_s
        if self._isolated is not None:
            self._end_isolation(max(clocks.scheduler, self._isolated))
        for (source, wait), (what, deadline) in self._waits.items():
            self._overdue(f"{source} waits for {what} ({wait}), which", deadline, clocks.pipelines)
        for what, deadline in self._commands.values():
            self._overdue(what, deadline, clocks.scheduler)
        for hold, until in self._holds.items():
            earliest = min([until, *self._leaves(*hold)])
            self._overdue(f"{hold[0]} holds {hold[1]}, which", earliest, clocks.scheduler)

    def _overdue(self, what: str, deadline: float, now: float) -> None:
        if now > self._effective(deadline):
            self._bad(8, f"{what} had to end by {deadline:.1f} s and never did, until {now:.1f} s")

    def _effective(self, deadline: float) -> float:
        return max(deadline, self._restarted) + SLACK_S

    def _isolated_for(self, time: float) -> float:
        return 0.0 if self._isolated is None else time - self._isolated

    def _limit(self, name: str) -> float:
        return self._ledger.limits.get(name, 0.0)

    def _node(self, entry: Entry, event: ev.NodeDraining | ev.NodeAway | ev.NodeHere) -> None:
        gpus = frozenset(self._ledger.pool.units_of([event.node]))
        self._by.pop(gpus, None)
        if isinstance(event, ev.NodeDraining) and event.by is not None:
            self._by[gpus] = event.by

    def _isolated_now(self, entry: Entry, event: ev.Isolated) -> None:
        self._isolated = entry.time
        if self._given_up is not None and entry.time < self._given_up + self._limit("lease_s") / 2:
            self._bad(8, "the scheduler takes itself for cut off again before anybody can have been heard")

    def _reconnected(self, entry: Entry, event: ev.Reconnected) -> None:
        if self._isolated is None:
            self._bad(8, "the scheduler is reconnected without having been isolated")
        else:
            self._end_isolation(entry.time)
        self._given_up = entry.time if event.given_up else None

    def _end_isolation(self, time: float) -> None:
        assert self._isolated is not None  # noqa: S101 - callers looked
        seconds, self._isolated = time - self._isolated, None
        if seconds > (most := self._limit("isolation_s")) + SLACK_S:
            self._bad(8, f"the scheduler took itself for cut off for {seconds:.1f} s of at most {most:g} s")
        self._commands = {key: (what, deadline + seconds) for key, (what, deadline) in self._commands.items()}
        self._holds = {key: until + seconds for key, until in self._holds.items()}
        self._by = {gpus: by + seconds for gpus, by in self._by.items()}

    def _started(self, entry: Entry, event: ev.SchedulerStarted) -> None:
        self._restarted = entry.time
        self._isolated = self._given_up = None

    def _jumped(self, entry: Entry, event: ev.ClockJumped) -> None:
        self._restarted = entry.time
        self._drift_s += abs(event.seconds) + self._limit("max_tick_s")

    def _registered(self, entry: Entry, event: ev.Registered) -> None:
        self._given_up = None

    def _unregistered(self, entry: Entry, event: ev.Unregistered) -> None:
        self._given_up = None
        # What a pipeline's processes waited for ended with them; only one that was not ended, or is not the one that is
        # meant, may still say so.
        waits = [wait for wait in self._waits if wait[0].partition("/")[0] == event.pipeline]
        for wait in waits:
            del self._waits[wait]
        if event.reason in _OUTLIVED or self._ledger.gap:
            self._outlived.update(waits)
        for key in [key for key in self._holds if key[0] == event.pipeline]:
            del self._holds[key]

    def _begun(self, entry: Entry, event: rec.WaitBegun) -> None:
        self._waits[entry.source, event.wait_id] = (event.what, event.deadline)

    def _wait_ended(self, entry: Entry, event: rec.WaitEnded) -> None:
        key = (entry.source, event.wait_id)
        wait = self._waits.pop(key, None)
        if wait is None and key in self._outlived:
            self._outlived.remove(key)
        elif wait is None:
            self._bad(8, f"{entry.source} ends wait {event.wait_id}, which it had not begun")
        elif entry.time > self._effective(wait[1]):
            what, deadline = wait
            waited = f"waited for {what} until {entry.time:.1f} s"
            self._bad(8, f"{entry.source} {waited}, its deadline was {deadline:.1f} s")

    def _sent(self, entry: Entry, event: ev.CommandSent) -> None:
        where = f"rank {event.rank}" if event.rank >= 0 else event.cluster
        what = f"{event.verb} of {where} of {event.pipeline} ({event.command})"
        self._commands[event.command] = (what, event.deadline)

    def _ended(self, entry: Entry, event: ev.CommandEnded) -> None:
        command = self._commands.pop(event.command, None)
        if command is None:
            if not self._ledger.gap:
                self._bad(8, f"command {event.command} ends without having been sent, or twice")
        elif entry.time > self._effective(command[1] + self._isolated_for(entry.time)):
            what, deadline = command
            ended = f"ended ({event.outcome}) at {entry.time:.1f} s"
            self._bad(8, f"{what} {ended}, its deadline was {deadline:.1f} s")

    def _granted(self, entry: Entry, event: ev.Granted) -> None:
        self._holds[event.pipeline, event.cluster] = event.hold_until

    def _released(self, entry: Entry, event: ev.Released) -> None:
        self._end_hold((event.pipeline, event.cluster), entry.time)

    def _fenced(self, entry: Entry, event: ev.Fenced) -> None:
        self._given_up = None
        if self._isolated is not None and event.reason.startswith("no heartbeat"):
            self._bad(8, f"{event.pipeline} was fenced for its silence while the scheduler was cut off")
        mine = [key for key in self._holds if key[0] == event.pipeline]
        allowed = min((self._holds[key] for key in mine), default=entry.time)
        if event.reason.startswith("it held") and entry.time < allowed:
            self._bad(8, f"{event.pipeline} was fenced for holding too long, it may hold until {allowed:.1f} s")
        for key in mine:
            self._end_hold(key, entry.time)

    def _leaves(self, pipeline: str, cluster: str) -> list[float]:
        """When the nodes leave on which a hold is."""
        held = self._ledger.leases.get((pipeline, cluster, -1), ())
        return [by for gpus, by in self._by.items() if not gpus.isdisjoint(held)]

    def _end_hold(self, hold: tuple[str, str], time: float) -> None:
        until = self._holds.pop(hold, None)
        if until is not None:
            until = min([until, *self._leaves(*hold)])
        if until is not None and time > self._effective(until + self._isolated_for(time)):
            self._bad(8, f"{hold[0]} held {hold[1]} until {time:.1f} s, it had to end by {until:.1f} s")

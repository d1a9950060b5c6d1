"""What a simulation sees that no record says: the real time beside the scheduler's, which messages arrived, and the
scheduler's state as it is.

Everything here raises Misbehaviour; nothing changes what is watched.
"""

from __future__ import annotations

from nemo_rl.time_sharing.log import audit
from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.log.state import SchedulerState
from nemo_rl.time_sharing.protocol.types import Limits, Status
from nemo_rl.utils.record import Entry

_SLACK_S = 5.0
_AUDIT_EVERY = 20
"""Entries of the log."""
_TAKES_STOCK = (ev.Granted, ev.Released, ev.RankMoved, ev.Requested, ev.RequestDropped, ev.DemandReported, ev.Fenced)


class Misbehaviour(AssertionError):
    """The scheduler or an agent did what its contract rules out."""


class SchedulerWatch:
    """Watches one scheduler, from its start to its end."""

    def __init__(self, limits: Limits, entries: list[Entry], now: float, real: float) -> None:
        self._limits, self._entries = limits, entries
        self._now, self._real = now, real
        self._audited = self._read = len(entries)
        self._heard: dict[tuple[str, int], tuple[int, float]] = {}
        """Number and time of the newest status, by pipeline and incarnation."""
        self._took_stock: set[str] = set()
        self._began = self._spared_at = now
        self._isolated = False
        self._jumps = 0

    def jumped(self) -> None:
        """The clock of the machine was set."""
        self._jumps += 1

    def observe(self, state: SchedulerState, now: float, real: float) -> None:
        """After each tick."""
        if now - self._now > real - self._real + self._jumps * self._limits.max_tick_s + 1e-6:
            raise Misbehaviour(f"{real - self._real:.1f} s passed, and {now - self._now:.1f} s on the steady clock")
        self._now, self._real, self._jumps = now, real, 0
        self._read_log()
        if self._read >= self._audited + _AUDIT_EVERY:
            self.audit(state)
        if not self._isolated:
            self._check_silence(state, now)

    def audit(self, state: SchedulerState) -> None:
        """Raises where the state contradicts itself."""
        self._audited = len(self._entries)
        problem = next(audit.problems(state), None)
        if problem is not None:
            raise Misbehaviour(problem)

    def status_comes(self, state: SchedulerState, status: Status, now: float) -> int:
        """Before a status is taken at `now`; returns how long the log may be if the status changes nothing."""
        self._read_log()
        key = (status.pipeline, status.incarnation)
        pipeline = state.pipelines.get(status.pipeline)
        if pipeline is not None and pipeline.incarnation == status.incarnation:
            newest, _ = self._heard.get(key, (-1, 0.0))
            if status.seq > newest:
                self._heard[key] = (status.seq, now)
            if status.term >= state.term or not state.recovering or pipeline.registered_at >= self._began:
                self._took_stock.add(status.pipeline)
        return len(self._entries)

    def status_taken(self, state: SchedulerState, status: Status, began: int) -> None:
        """After a status was taken: one from before the restart says nothing of who holds what now."""
        if status.pipeline in self._took_stock or not state.recovering:
            return
        for entry in self._entries[began:]:
            if isinstance(entry.event, _TAKES_STOCK) and entry.event.pipeline == status.pipeline:
                raise Misbehaviour(f"a status of term {status.term} is taken for an inventory of term {state.term}")

    def _read_log(self) -> None:
        for entry in self._entries[self._read :]:
            self._check(entry)
        self._read = len(self._entries)

    def _check(self, entry: Entry) -> None:
        event = entry.event
        if isinstance(event, ev.SchedulerStarted | ev.Isolated | ev.Reconnected):
            self._spared_at, self._isolated = entry.time, isinstance(event, ev.Isolated)
        elif isinstance(event, ev.Fenced) and event.reason.startswith("no heartbeat"):
            _, heard = self._heard.get((event.pipeline, event.incarnation), (-1, float("-inf")))
            if entry.time < heard + self._limits.lease_s:
                raise Misbehaviour(
                    f"{event.pipeline} was heard at {heard:.1f} s and is fenced at {entry.time:.1f} s for its silence"
                )

    def _check_silence(self, state: SchedulerState, now: float) -> None:
        for name, pipeline in state.pipelines.items():
            _, heard = self._heard.get((name, pipeline.incarnation), (-1, 0.0))
            since = max(heard, self._spared_at, pipeline.registered_at)
            if not pipeline.fenced and now > since + self._limits.lease_s + _SLACK_S:
                raise Misbehaviour(f"{name} was heard last at {since:.1f} s and is not fenced at {now:.1f} s")

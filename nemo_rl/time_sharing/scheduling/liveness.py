"""The scheduler's own time, leases of pipelines that heartbeats renew, and whether the scheduler itself is cut off.

Deadlines and leases are measured on steady time: a machine clock that is set back, or a process that was suspended,
would otherwise expire every lease at once. When most pipelines fall silent at once, a broken network is likelier than
as many deaths, and to end them all would throw away their work for nothing. Invariants: isolation lasts at most
`isolation_s`; once that has passed it does not begin again before most have been heard; no pipeline is fenced while it
lasts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from nemo_rl.time_sharing.log.events import Isolated, Reconnected
from nemo_rl.time_sharing.log.state import SchedulerState
from nemo_rl.time_sharing.protocol.types import Limits


class SteadyClock:
    """Turns readings of any clock into steady time.

    start: the first steady time, after a restart no earlier than the last log entry. reading: the reading that belongs
    to it, by default the first one taken. max_step_s: the largest step believed; the rest of a larger one is left out
    and returned by `advance`.
    """

    def __init__(self, *, start: float = 0.0, reading: float | None = None, max_step_s: float = 5.0) -> None:
        self.now = start
        self._max_step_s = max_step_s
        self._reading = reading

    def advance(self, reading: float) -> float:
        """Takes a reading, in seconds; returns by how much it jumped (negative: backwards), 0.0 for a normal step."""
        if self._reading is None:
            self._reading = reading
            return 0.0
        step = reading - self._reading
        self._reading = reading
        if step < 0:
            return step
        self.now += min(step, self._max_step_s)
        return max(step - self._max_step_s, 0.0)

    def steady(self, reading: float) -> float:
        """Steady time of a reading as `advance` would compute it, without advancing."""
        step = 0.0 if self._reading is None else min(max(reading - self._reading, 0.0), self._max_step_s)
        return self.now + step


logger = logging.getLogger(__name__)

_SEVERAL = 2


class Isolation:
    """The scheduler's judgement of its own network. `since`: steady time at which most had fallen silent; None while it
    hears enough of them.
    """

    def __init__(self) -> None:
        self.since: float | None = None
        self._given_up = False

    def update(self, now: float, seen: Mapping[str, float], limits: Limits) -> Isolated | Reconnected | None:
        """The change since the last call, if any.

        `seen`: time of each pipeline's last message. `limits`: a pipeline is silent after half of `lease_s`; the
        scheduler is isolated when more than half of the pipelines, and at least two, are silent.
        """
        silent = sum(now - at > limits.lease_s / 2 for at in seen.values())
        # One silent pipeline says nothing of the network.
        most = silent >= _SEVERAL and 2 * silent > len(seen)
        if self.since is None:
            self._given_up = self._given_up and most
            if not most or self._given_up or not limits.isolation_s:
                return None
            self.since = now
            return Isolated(silent, len(seen))
        lasted = now - self.since
        if most and lasted < limits.isolation_s:
            return None
        self.since, self._given_up = None, most
        return Reconnected(lasted, most)


class Liveness:
    """Leases by steady time. `emit`: writes an event and applies it."""

    def __init__(self, state: SchedulerState, emit: Callable[[object], None]) -> None:
        self._state, self._emit = state, emit
        self._seen: dict[str, float] = {}
        self._isolation = Isolation()

    @property
    def isolated(self) -> bool:
        """Whether most pipelines have fallen silent."""
        return self._isolation.since is not None

    def heard(self, name: str, now: float) -> None:
        """Renews a pipeline's lease."""
        self._seen[name] = now

    def forget(self, name: str) -> None:
        """A pipeline is registered no more."""
        self._seen.pop(name, None)

    def update_isolation(self, now: float) -> None:
        """Judges the scheduler's own network."""
        pipelines, limits = self._state.pipelines, self._state.limits
        seen = {name: self._seen.setdefault(name, now) for name, p in pipelines.items() if not p.fenced}
        change = self._isolation.update(now, seen, limits)
        if change is None:
            return
        logger.warning("event=%s registered=%d", type(change).__name__.lower(), len(seen))
        self._emit(change)
        if isinstance(change, Reconnected) and not change.given_up:
            # Pipelines that are still silent may be about to reconnect too.
            for name in seen:
                self._seen[name] = now

    def overdue(self, name: str, now: float) -> str | None:
        """Why a pipeline must be fenced; None while its lease lasts and it holds nothing for too long."""
        limits = self._state.limits
        silent = now - self._seen.setdefault(name, now)
        if silent > limits.lease_s:
            return f"no heartbeat for {silent:.1f} s (lease {limits.lease_s:g} s)"
        held = self._state.pipelines[name].held
        late = next((cluster for cluster, grant in held.items() if now > grant.hold_until), None)
        return None if late is None else f"it held {late} longer than max_hold_s={limits.max_hold_s:g}"

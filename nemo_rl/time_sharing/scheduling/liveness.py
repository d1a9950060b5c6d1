"""Who is alive: leases of pipelines that heartbeats renew, and whether it is the scheduler itself who is cut off.

When most pipelines fall silent at once, a broken network is likelier than as many deaths, and to end them all would
throw away their work for nothing. Invariants: isolation lasts at most `isolation_s`; once that has passed it does not
begin again before most have been heard; no pipeline is fenced while it lasts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from nemo_rl.time_sharing.log.events import Isolated, Reconnected
from nemo_rl.time_sharing.log.state import SchedulerState
from nemo_rl.time_sharing.protocol.types import Limits

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
        """What has changed, if anything. `seen`: when each pipeline was heard last. `limits`: half of `lease_s` without
        a message is silence; more than half of the pipelines, two at least, are most.
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

    @property
    def known(self) -> frozenset[str]:
        """Pipelines that were heard and not forgotten."""
        return frozenset(self._seen)

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
            # Who is still silent may be on the way back too.
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

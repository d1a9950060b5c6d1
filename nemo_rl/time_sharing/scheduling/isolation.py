"""Whether it is the scheduler who is cut off, and not the pipelines who are gone.

When most pipelines fall silent at once, a broken network is likelier than as many deaths, and to end them all would
throw away their work for nothing. Knows when each was heard last, and nothing else. Invariants: isolation lasts at most
`isolation_s`; once that has passed it does not begin again before most have been heard.
"""

from __future__ import annotations

from collections.abc import Mapping

from nemo_rl.time_sharing.log.events import Isolated, Reconnected
from nemo_rl.time_sharing.protocol.types import Limits

_SEVERAL = 2


class Isolation:
    """The scheduler's judgement of its own network.

    Attributes:
        since: Steady time at which most had fallen silent; None while it hears enough of them.
    """

    def __init__(self) -> None:
        self.since: float | None = None
        self._given_up = False

    def look(self, now: float, seen: Mapping[str, float], limits: Limits) -> Isolated | Reconnected | None:
        """What has changed, if anything.

        Args:
            now: Steady time.
            seen: When each pipeline was heard last.
            limits: Half of `lease_s` without a word is silence; more than half of the pipelines, two at least, are
                most.
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

"""The two clocks of a record: the scheduler's steady time, and the machines' time in all other entries.

Every entry moves its writer's clock, so time passes whatever is written. The clocks agree but for the jumps that the
scheduler's leaves out; one is compared with the other only beyond these. Invariant: time never goes back within one
source.
"""

from __future__ import annotations

from nemo_rl.time_sharing.protocol.types import SCHEDULER

SLACK_S = 5.0
"""What timers may be late (ticks come at least every second, a restarted scheduler needs a few to catch up), and
machines' clocks may differ."""


class Clocks:
    """Newest time of each source, and the present time derived from them."""

    def __init__(self) -> None:
        self.latest: dict[str, float] = {}
        self.drift_s = 0.0

    def went_back(self, source: str, time: float) -> str | None:
        """Violation text of an entry that is earlier than its source's last one, beyond the tolerance for corrected
        clocks.
        """
        before = self.latest[source]
        # The scheduler's clock is steady by its own promise; another machine's may be corrected a little.
        if time < before - (0.0 if source == SCHEDULER else SLACK_S):
            return f"time goes back in the record of {source}, from {before:.3f} s to {time:.3f} s"
        return None

    @property
    def scheduler(self) -> float:
        """Now, on the scheduler's clock."""
        return max(self.latest.get(SCHEDULER, 0.0), self._others() - self.drift_s)

    @property
    def pipelines(self) -> float:
        """Now, on the pipelines' clocks."""
        return max(self._others(), self.latest.get(SCHEDULER, 0.0) - self.drift_s)

    def _others(self) -> float:
        return max((time for source, time in self.latest.items() if source != SCHEDULER), default=0.0)

"""How much of the pool the nodes of a team's quotas have had: slots held now, and slot-seconds, of which older ones
count less.
"""

from __future__ import annotations

from collections.abc import Mapping

from nemo_rl.time_sharing.protocol.quotas import Quotas
from nemo_rl.time_sharing.protocol.types import PipelineOptions


class QuotaUse:
    """Counts slots and slot-seconds of each node.

    Args:
        use: Slot-seconds by node as they were weighed at `weighed_at`.
        had: Those from then to `counted_at`.
    """

    def __init__(
        self, quotas: Quotas, weighed_at: float, use: Mapping[str, float], had: Mapping[str, float], counted_at: float
    ) -> None:
        self.quotas, self.weighed_at, self.use = quotas, weighed_at, dict(use)
        self.holds: dict[str, int] = {}
        self.counted_at, self._had = counted_at, dict(had)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, QuotaUse) and self._parts() == other._parts()

    __hash__ = None  # type: ignore[assignment]

    def _parts(self) -> object:
        rest = (self.weighed_at, self.use, self._held(), self.had(self.counted_at))
        return self.quotas.nodes, self.quotas.half_life_s, *rest

    def _held(self) -> dict[str, int]:
        return {node: slots for node, slots in self.holds.items() if slots}

    def add(self, owner: PipelineOptions, change: int, at: float) -> None:
        """The jobs of this owner hold so many slots more, or fewer, from now on."""
        self._advance(at)
        for node in self.quotas.above(owner):
            self.holds[node] = self.holds.get(node, 0) + change

    def had(self, now: float) -> dict[str, float]:
        """Slot-seconds by node since they were weighed."""
        self._advance(now)
        return dict(self._had)

    def _advance(self, at: float) -> None:
        seconds, self.counted_at = at - self.counted_at, at
        if seconds:
            for node, slots in self._held().items():
                self._had[node] = self._had.get(node, 0.0) + slots * seconds

    def weigh(self, use: Mapping[str, float], at: float) -> None:
        """Counts on from these."""
        self._advance(at)
        self.use, self.weighed_at, self._had = dict(use), at, dict[str, float]()

    def weighed(self, now: float) -> dict[str, float]:
        """Slot-seconds by node until now; those of a half-life ago count half."""
        fades, had = 0.5 ** ((now - self.weighed_at) / self.quotas.half_life_s), self.had(now)
        return {node: self.use.get(node, 0.0) * fades + had.get(node, 0.0) for node in sorted(self.use.keys() | had)}

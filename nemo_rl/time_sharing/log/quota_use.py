"""How much of the pool the nodes of a team's quotas have had: slots held now, and slot-seconds, of which older ones
count less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from nemo_rl.time_sharing.protocol.quotas import QuotaNode, Quotas
from nemo_rl.time_sharing.protocol.types import PipelineOptions


@dataclass(eq=False)
class QuotaUse:
    """Counts slots and slot-seconds of each node. `use`: slot-seconds by node as they were weighed at `weighed_at`;
    `had`: those from then to `counted_at`. `holds`, slots by node, is not saved.
    """

    nodes: tuple[QuotaNode, ...]
    half_life_s: float
    weighed_at: float
    use: Mapping[str, float]
    had: Mapping[str, float]
    counted_at: float
    slots_per_gpu: int = 1

    def __post_init__(self) -> None:
        self.quotas = Quotas(self.nodes, self.half_life_s, self.slots_per_gpu)
        self.holds: dict[str, int] = {}

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, QuotaUse) and (asdict(self), self.holds) == (asdict(other), other.holds)

    def add(self, owner: PipelineOptions, change: int, at: float) -> None:
        """The jobs of this owner hold so many slots more, or fewer, from now on."""
        self._advance(at)
        for node in self.quotas.above(owner):
            self.holds[node] = self.holds.get(node, 0) + change
            if not self.holds[node]:
                del self.holds[node]

    def _advance(self, at: float) -> None:
        seconds, self.counted_at = at - self.counted_at, at
        if seconds:
            self.had = {**self.had, **{node: self.had.get(node, 0.0) + n * seconds for node, n in self.holds.items()}}

    def weigh(self, use: Mapping[str, float], at: float) -> None:
        """Counts on from these."""
        self._advance(at)
        self.use, self.weighed_at, self.had = dict(use), at, dict[str, float]()

    def weighed(self, now: float) -> dict[str, float]:
        """Slot-seconds by node until now; those of a half-life ago count half."""
        self._advance(now)
        fades = 0.5 ** ((now - self.weighed_at) / self.half_life_s)
        nodes = sorted(self.use.keys() | self.had.keys())
        return {node: self.use.get(node, 0.0) * fades + self.had.get(node, 0.0) for node in nodes}

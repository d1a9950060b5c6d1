"""The nodes that are to leave, or away, and the time for which each of their GPUs is out of use: derived from the
record, for all groups of checks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.protocol.topology import Pool

NODE_EVENTS = (ev.NodeDraining, ev.NodeAway, ev.NodeHere)
NodeEvent = ev.PoolOpened | ev.NodeDraining | ev.NodeAway | ev.NodeHere


class Absences:
    """Follows the events of nodes.

    `pool`: as it was opened. `gone`: GPUs on which no engine may wake; `away`: those of them whose nodes have left, so
    that nothing at all may begin there.
    """

    def __init__(self) -> None:
        self.gone: frozenset[int] = frozenset()
        self.away: frozenset[int] = frozenset()
        self.pool = Pool(1, 1)
        self._since: dict[int, float] = {}
        self._past: list[tuple[frozenset[int], float, float]] = []

    def take(self, event: NodeEvent, time: float) -> frozenset[int]:
        """The GPUs of the event's node; none for a new pool, whose nodes are all there."""
        if isinstance(event, ev.PoolOpened):
            self.pool, self.gone, self.away = event.pool, frozenset(), frozenset()
            self._since.clear()
            return self.gone
        gpus = frozenset(self.pool.units_of([event.node]))
        self.away = self.away | gpus if isinstance(event, ev.NodeAway) else self.away - gpus
        if isinstance(event, ev.NodeHere):
            self.gone -= gpus
            self._past.append((gpus, self._since.pop(event.node, time), time))
        else:
            self.gone |= gpus
            self._since.setdefault(event.node, time)
        return gpus

    def of(self, gpus: Iterable[int]) -> list[tuple[frozenset[int], float, float]]:
        """The nodes that some of these GPUs are on and that were gone: their GPUs, from when, until when."""
        wanted = frozenset(gpus)
        now = [(frozenset(self.pool.units_of([node])), since, math.inf) for node, since in self._since.items()]
        return [absence for absence in (*self._past, *now) if wanted & absence[0]]

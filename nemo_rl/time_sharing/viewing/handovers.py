"""How long GPUs are on their way: from the decision to give them to a cluster or a rank until they are used there.

The one place that measures it: the simulator's table and the report of a record both ask here. A claim that is dropped
or fenced counts for nothing; a repeated one counts from its last decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.protocol.types import ACTOR_INFER, Phase


class Handover(NamedTuple):
    """From a claim on GPUs to their use: granted, or the rank routed. Seconds on the record's clock; `what` is a
    cluster, or `rank 3`.
    """

    pipeline: str
    what: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


class HandoverWatch:
    """Is shown every scheduler event in order; `found` are the hand-overs that came to their end."""

    def __init__(self) -> None:
        self.found: list[Handover] = []
        self._claimed: dict[tuple[str, str, int], float] = {}

    def take(self, time: float, event: object) -> None:
        if isinstance(event, ev.Claimed):
            self._claimed[event.pipeline, event.cluster, event.rank] = time
        elif isinstance(event, ev.Granted):
            self._end((event.pipeline, event.cluster, -1), time)
        elif isinstance(event, ev.RankMoved) and event.phase is Phase.SERVING:
            self._end((event.pipeline, ACTOR_INFER, event.rank), time)

    def _end(self, key: tuple[str, str, int], time: float) -> None:
        began = self._claimed.pop(key, None)
        if began is not None:
            self.found.append(Handover(key[0], key[1] if key[2] < 0 else f"rank {key[2]}", began, time))


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the values lie, interpolated; 0 for none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

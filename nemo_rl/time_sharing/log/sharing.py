"""Each pipeline's gain and loss by sharing so far: its share of the GPUs, and its slowdown.

A pipeline loses whole seconds while its trainer waits for GPUs that another uses, and a part of them while some of its
generation ranks are kept from GPUs, or come back from another's use of them. Slowdown = elapsed time / (elapsed time -
lost time): an estimate of how much sooner the pipeline would be where it is if it were alone. The cost of a pipeline's
own training to its own generation is not counted as lost.

Pipelines that use a GPU at the same time slow each other in addition, which no estimate shows; the scheduler measures
it (`scheduling.trials`), and the newest figures are kept here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.log.state import ACCOUNTED, InconsistentLog, PipelineState, SchedulerState
from nemo_rl.time_sharing.protocol.types import Phase


class Gain(NamedTuple):
    """Latest measurement of one pipeline among those that share its GPUs."""

    alone_s: float  # seconds of a step while the others paused
    together_s: float  # seconds of a step while all ran
    of_all: float  # how many times the work of one after the other all of them do together
    keeps: bool  # whether they go on together


class Sharing(NamedTuple):
    """One pipeline since its registration."""

    share: float  # part of the pool's GPU time that it held, 0 to 1
    slowdown: float  # seconds passed over seconds not lost to others, at least 1
    lost_s: float  # seconds lost
    gain: Gain | None = None  # by running beside others on the same GPUs; None before it was measured
    paused: str = ""  # why it makes way for others now


@dataclass(slots=True)
class _Pipeline:
    since: float
    until: float | None = None
    gpu_s: float = 0.0
    lost_s: float = 0.0
    gain: Gain | None = None
    paused: str = ""


class SharingWatch:
    """Folds a scheduler's log event by event; results are valid at any time at or after the last event."""

    def __init__(self) -> None:
        self._state = SchedulerState()
        self._pipelines: dict[str, _Pipeline] = {}
        self._last_user: dict[int, str] = {}
        self._now = 0.0

    def take(self, time: float, event: object) -> None:
        """The next event, at `time` seconds on the log's clock."""
        self._advance(time)
        match event:
            case ev.Registered():
                self._pipelines[event.pipeline] = _Pipeline(time)
            case ev.Paused():
                self._pipelines[event.pipeline].paused = event.reason
            case ev.Resumed():
                self._pipelines[event.pipeline].paused = ""
            case ev.SharingMeasured():
                for name, alone_s in event.alone_s.items():
                    self._pipelines[name].gain = Gain(alone_s, event.together_s[name], event.gain, event.keeps)
            case ev.Unregistered():
                self._pipelines[event.pipeline].until = self._now
            case _:
                pass
        if type(event) in ACCOUNTED:
            before = list(self._state.owner)
            # Behind a segment that was set aside, the next one begins with the whole state.
            with suppress(InconsistentLog, KeyError):
                self._state.apply(event, time)
            for gpu, (was, now) in enumerate(zip(before, self._state.owner, strict=False)):
                if was is not None and now is None:
                    self._last_user[gpu] = was.pipeline

    def so_far(self, time: float | None = None) -> dict[str, Sharing]:
        """Each pipeline by name, up to `time` (default: the last event)."""
        if time is not None:
            self._advance(time)
        return {name: self._of(pipeline) for name, pipeline in self._pipelines.items()}

    def _of(self, pipeline: _Pipeline) -> Sharing:
        passed = (self._now if pipeline.until is None else pipeline.until) - pipeline.since
        if passed <= 0:
            return Sharing(0.0, 1.0, 0.0)
        kept = max(passed - pipeline.lost_s, 1e-9)
        share = pipeline.gpu_s / (passed * self._state.pool.slots)
        return Sharing(share, passed / kept, pipeline.lost_s, pipeline.gain, pipeline.paused)

    def _advance(self, time: float) -> None:
        passed = time - self._now
        if passed <= 0:
            return
        self._now = time
        used = Counter(lease.pipeline for lease in self._state.owner[: self._state.pool.slots] if lease is not None)
        for name, pipeline in self._pipelines.items():
            if pipeline.until is None and name in self._state.pipelines:
                pipeline.gpu_s += used[name] * passed
                pipeline.lost_s += (1.0 - self._speed(self._state.pipelines[name])) * passed

    def _speed(self, pipeline: PipelineState) -> float:
        """How fast it is now, 1 for as fast as it would be without the others."""
        topology = pipeline.topology
        if pipeline.paused or any(self._others_use(pipeline, topology.clusters[one].gpus) for one in pipeline.wants):
            return 0.0
        mine = {gpu for held in pipeline.held.values() for gpu in held.gpus}
        ranks = [rank for rank, gpus in enumerate(topology.ranks) if mine.isdisjoint(gpus)]
        # More ranks than it has samples for would not make it faster.
        useful = min(len(ranks), -(-pipeline.demand.remaining // pipeline.rank_batch))
        if not useful or pipeline.held:
            return 1.0
        return min(sum(not self._is_kept_off(pipeline, rank) for rank in ranks) / useful, 1.0)

    def _is_kept_off(self, pipeline: PipelineState, rank: int) -> bool:
        """Whether a rank does not serve because of others."""
        gpus, awake = pipeline.topology.ranks[rank], pipeline.awake.get(rank)
        if awake is not None and awake.phase is Phase.SERVING:
            return False
        name, rises = pipeline.topology.pipeline, awake is not None and awake.phase is Phase.RISING
        return self._others_use(pipeline, gpus) or (
            rises and any(self._last_user.get(gpu, name) != name for gpu in gpus)
        )

    def _others_use(self, pipeline: PipelineState, gpus: Iterable[int]) -> bool:
        holders = (self._state.owner[gpu] for gpu in gpus)
        return any(lease is not None and lease.pipeline != pipeline.topology.pipeline for lease in holders)

"""Each pipeline's gain and loss by sharing so far: its share of the GPUs, and its slowdown.

A pipeline loses whole seconds while its trainer waits for GPUs that another uses, and a part of them while some of its
generation ranks are kept from GPUs, or come back from another's use of them. Slowdown = elapsed time / (elapsed time -
lost time): an estimate of how much sooner the pipeline would be where it is if it were alone. The cost of a pipeline's
own training to its own generation is not counted as lost.

Pipelines that use a GPU at the same time slow each other in addition, which no estimate shows; the scheduler measures
it (`scheduling.trials`), and the newest figures are kept here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.protocol.types import ACTOR_INFER, ClusterSpec, Phase


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
    clusters: dict[str, ClusterSpec]
    rank_batch: int
    until: float | None = None
    queue: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)
    phases: dict[int, Phase] = field(default_factory=dict)
    left: int = 0
    gpu_s: float = 0.0
    lost_s: float = 0.0
    gain: Gain | None = None
    paused: str = ""

    @property
    def ranks(self) -> int:
        spec = self.clusters[ACTOR_INFER]
        return len(spec.gpus) // spec.tp_size

    def gpus_of_rank(self, rank: int) -> tuple[int, ...]:
        spec = self.clusters[ACTOR_INFER]
        return spec.gpus[rank * spec.tp_size : (rank + 1) * spec.tp_size]

    def fixed(self, clusters: set[str]) -> set[int]:
        return {gpu for name in clusters for gpu in self.clusters[name].gpus}


class SharingWatch:
    """Folds a scheduler's log event by event; results are valid at any time at or after the last event."""

    def __init__(self) -> None:
        self._pipelines: dict[str, _Pipeline] = {}
        self._users: dict[int, dict[str, int]] = {}
        self._last_user: dict[int, str] = {}
        self._slots = 1
        self._now = 0.0

    def take(self, time: float, event: object) -> None:
        """The next event, at `time` seconds on the log's clock."""
        self._advance(time)
        match event:
            case ev.PoolOpened():
                self._slots = event.pool.slots
            case ev.Registered():
                clusters = {cluster.name: cluster for cluster in event.clusters}
                self._pipelines[event.pipeline] = _Pipeline(time, clusters, event.rank_batch)
            case ev.Requested():
                self._pipelines[event.pipeline].queue.add(event.cluster)
            case ev.RequestDropped():
                self._pipelines[event.pipeline].queue.discard(event.cluster)
            case ev.Granted():
                self._grant(event.pipeline, event.cluster)
            case ev.PriorityChanged():
                self._pipelines[event.pipeline].queue.discard(event.cluster)
            case ev.Released():
                self._release(event.pipeline, event.cluster)
            case ev.RankMoved():
                self._move(event.pipeline, event.rank, event.phase)
            case ev.DemandReported():
                pipeline = self._pipelines[event.pipeline]
                pipeline.left = max(event.target - event.done, 0) * event.unit
                pipeline.rank_batch = event.rank_batch or pipeline.rank_batch
            case ev.Paused():
                self._pipelines[event.pipeline].paused = event.reason
            case ev.Resumed():
                self._pipelines[event.pipeline].paused = ""
            case ev.SharingMeasured():
                for name, alone_s in event.alone_s.items():
                    self._pipelines[name].gain = Gain(alone_s, event.together_s[name], event.gain, event.keeps)
            case ev.Unregistered():
                self._end(event.pipeline)
            case _:
                pass

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
        share = pipeline.gpu_s / (passed * self._slots)
        return Sharing(share, passed / kept, pipeline.lost_s, pipeline.gain, pipeline.paused)

    def _advance(self, time: float) -> None:
        passed = time - self._now
        if passed <= 0:
            return
        self._now = time
        used = dict.fromkeys(self._pipelines, 0)
        for slot, users in self._users.items():
            for name in users:
                used[name] += slot < self._slots
        for name, pipeline in self._pipelines.items():
            if pipeline.until is None:
                pipeline.gpu_s += used[name] * passed
                pipeline.lost_s += (1.0 - self._speed(name, pipeline)) * passed

    def _speed(self, name: str, pipeline: _Pipeline) -> float:
        """How fast it is now, 1 for as fast as it would be without the others."""
        if pipeline.paused:
            return 0.0
        if any(self._others_use(name, pipeline.clusters[cluster].gpus) for cluster in pipeline.queue):
            return 0.0
        if pipeline.left and ACTOR_INFER in pipeline.clusters:
            mine = pipeline.fixed(pipeline.held)
            possible = serving = 0
            for rank in range(pipeline.ranks):
                gpus = pipeline.gpus_of_rank(rank)
                if mine.intersection(gpus):
                    continue
                possible += 1
                serving += not self._kept_from(name, gpus, pipeline.phases.get(rank, Phase.ASLEEP))
            # More ranks than it has samples for would not make it faster.
            useful = min(possible, -(-pipeline.left // pipeline.rank_batch))
            if useful:
                return 1.0 if pipeline.held else min(serving / useful, 1.0)
        return 1.0

    def _kept_from(self, name: str, gpus: tuple[int, ...], phase: Phase) -> bool:
        """Whether a rank does not serve because of others."""
        if phase is Phase.SERVING:
            return False
        if self._others_use(name, gpus):
            return True
        return phase is Phase.RISING and any(self._last_user.get(gpu, name) != name for gpu in gpus)

    def _others_use(self, name: str, gpus: tuple[int, ...]) -> bool:
        return any(user != name for gpu in gpus for user in self._users.get(gpu, ()))

    def _grant(self, name: str, cluster: str) -> None:
        pipeline = self._pipelines[name]
        pipeline.queue.discard(cluster)
        if cluster not in pipeline.held:
            pipeline.held.add(cluster)
            self._use(name, pipeline.clusters[cluster].gpus, 1)

    def _release(self, name: str, cluster: str) -> None:
        pipeline = self._pipelines[name]
        if cluster in pipeline.held:
            pipeline.held.discard(cluster)
            self._use(name, pipeline.clusters[cluster].gpus, -1)

    def _move(self, name: str, rank: int, phase: Phase) -> None:
        pipeline = self._pipelines[name]
        before = pipeline.phases.get(rank, Phase.ASLEEP)
        pipeline.phases[rank] = phase
        change = (phase is not Phase.ASLEEP) - (before is not Phase.ASLEEP)
        if change:
            self._use(name, pipeline.gpus_of_rank(rank), change)

    def _use(self, name: str, gpus: tuple[int, ...], change: int) -> None:
        for gpu in gpus:
            users = self._users.setdefault(gpu, {})
            users[name] = users.get(name, 0) + change
            if not users[name]:
                del users[name]
                self._last_user[gpu] = name

    def _end(self, name: str) -> None:
        pipeline = self._pipelines[name]
        pipeline.until = self._now
        for users in self._users.values():
            users.pop(name, None)

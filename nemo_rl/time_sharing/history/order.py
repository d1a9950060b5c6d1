"""Invariants 3 (at the shard), 5, 6 and 7: what must come before what.

A shard serves only published weights and takes requests only while routed; training GPUs come back after the new
version is out; the next training waits for expands that are under way. Adapters of a job draw and train inside their
job, on ranks of the pool that are awake; their own versions are looked after by `prompts`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from nemo_rl.time_sharing.history.clocks import Clocks
from nemo_rl.time_sharing.history.ledger import Checks, Ledger
from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.protocol.types import ACTOR_INFER, ACTOR_TRAIN, Phase, Priority
from nemo_rl.utils import record_events as rec
from nemo_rl.utils.record import Entry
from nemo_rl.utils.record_events import job_of_adapter


@dataclass(slots=True)
class _Pipeline:
    published: int | None = None
    routed: dict[int, int] = field(default_factory=dict)
    loaded: dict[int, int] = field(default_factory=dict)
    syncs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    awake: set[int] = field(default_factory=set)
    running: dict[int, set[str]] = field(default_factory=dict)
    generation: int = -1
    trained_version: int | None = None
    training_memory: bool = False
    fenced: bool = False
    waking: set[int] = field(default_factory=set)
    claimed: set[int] = field(default_factory=set)
    priority: Priority | None = None
    unsure: bool = False


def _name(entry: Entry) -> str:
    return entry.source.partition("/")[0]


class OrderChecks(Checks):
    """Watches shards, versions and grants of every pipeline."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger
        self._pipelines: defaultdict[str, _Pipeline] = defaultdict(_Pipeline)

    def tail_lost(self, entry: Entry) -> None:
        """Which expands are under way, and what training GPUs are held for, is known again when the new scheduler says
        so.
        """
        for pipeline in self._pipelines.values():
            pipeline.unsure = True
            pipeline.waking.clear()
            pipeline.claimed.clear()

    def finish(self, clocks: Clocks, ended: bool) -> None:
        if not ended:
            return
        for name, pipeline in self._pipelines.items():
            left = sorted(request for requests in pipeline.running.values() for request in requests)
            if left and not pipeline.fenced:
                self._bad(7, f"request {left[0]} of {name} never finished")

    def _of(self, entry: Entry) -> _Pipeline:
        return self._pipelines[_name(entry)]

    def _inside_its_job(self, entry: Entry, does: str, invariant: int) -> bool:
        """Whether an entry is of an adapter; its job must hold GPUs."""
        job = job_of_adapter(_name(entry))
        if job is not None and not self._pipelines[job].awake:
            self._bad(invariant, f"{entry.source} {does}, and its job holds no GPUs")
        return job is not None

    def _registered(self, entry: Entry, event: ev.Registered) -> None:
        self._pipelines[event.pipeline] = _Pipeline()

    def _fenced(self, entry: Entry, event: ev.Fenced) -> None:
        pipeline = self._pipelines[event.pipeline]
        pipeline.fenced = True
        pipeline.waking.clear()
        pipeline.claimed.clear()

    # Invariant 6.

    def _granted(self, entry: Entry, event: ev.Granted | ev.PriorityChanged) -> None:
        pipeline = self._pipelines[event.pipeline]
        if event.cluster != ACTOR_TRAIN:
            return
        pipeline.priority, pipeline.unsure = event.priority, False
        if event.priority is Priority.ACTOR_TRAINING and not self._ledger.gap:
            under_way = pipeline.waking | pipeline.claimed
            if under_way:
                what = f"{event.pipeline} may train step {event.step}"
                self._bad(6, f"{what} while its ranks {sorted(under_way)} are being expanded")

    def _rank(self, entry: Entry, event: ev.RankMoved) -> None:
        pipeline = self._pipelines[event.pipeline]
        pipeline.claimed.discard(event.rank)
        if event.phase is Phase.RISING:
            pipeline.waking.add(event.rank)
        else:
            pipeline.waking.discard(event.rank)

    def _claimed(self, entry: Entry, event: ev.Claimed) -> None:
        if event.cluster == ACTOR_INFER:
            self._pipelines[event.pipeline].claimed.add(event.rank)

    def _claim_dropped(self, entry: Entry, event: ev.ClaimDropped) -> None:
        self._pipelines[event.pipeline].claimed.discard(event.rank)

    # Invariant 5.

    def _step(self, entry: Entry, event: rec.StepFinished) -> None:
        if self._inside_its_job(entry, f"finishes step {event.step}", 5):
            return
        pipeline = self._of(entry)
        pipeline.trained_version = event.version
        if not pipeline.training_memory:
            self._bad(5, f"{entry.source} finishes step {event.step} without holding its training GPUs")
        elif pipeline.priority is not Priority.ACTOR_TRAINING and not pipeline.fenced and not pipeline.unsure:
            self._bad(5, f"{entry.source} finishes step {event.step} while it holds its GPUs for {pipeline.priority}")

    def _memory_taken(self, entry: Entry, event: ev.MemoryTaken) -> None:
        if event.what == ACTOR_TRAIN:
            self._of(entry).training_memory = True

    def _memory_freed(self, entry: Entry, event: ev.MemoryFreed) -> None:
        pipeline = self._of(entry)
        if event.what == ACTOR_TRAIN:
            pipeline.training_memory = False
            self._check_published(entry.source, pipeline)

    def _released(self, entry: Entry, event: ev.Released) -> None:
        if event.cluster == ACTOR_TRAIN and not self._ledger.gap:
            self._check_published(event.pipeline, self._pipelines[event.pipeline])

    def _check_published(self, who: str, pipeline: _Pipeline) -> None:
        if pipeline.fenced or pipeline.trained_version is None:
            return
        if pipeline.published is None or pipeline.published < pipeline.trained_version:
            versions = f"version {pipeline.trained_version} trained and {pipeline.published} published"
            self._bad(5, f"{who} gives its training GPUs back with {versions}")

    # Invariants 3 and 7.

    def _version_published(self, entry: Entry, event: rec.VersionPublished) -> None:
        if job_of_adapter(_name(entry)) is not None:
            return
        pipeline = self._of(entry)
        if pipeline.published is not None and event.version < pipeline.published:
            self._bad(3, f"{entry.source} publishes version {event.version} after {pipeline.published}")
        pipeline.published = event.version
        for shard, _ in sorted(pipeline.routed.items()):
            if pipeline.loaded.get(shard) != event.version:
                what = f"{entry.source} publishes version {event.version}"
                self._bad(3, f"{what} while shard {shard} serves version {pipeline.loaded.get(shard)}")

    def _routed(self, entry: Entry, event: rec.ShardRouted) -> None:
        pipeline = self._of(entry)
        self._check_generation(entry, pipeline, event.generation)
        if event.shard not in pipeline.awake:
            self._bad(7, f"{entry.source} routes shard {event.shard}, which is asleep")
        loaded, published = pipeline.loaded.get(event.shard), pipeline.published
        if published is None or not loaded == published == event.version:
            what = f"{entry.source} routes shard {event.shard} as version {event.version}"
            self._bad(3, f"{what}; it holds {loaded}, published is {published}")
        pipeline.routed[event.shard] = event.version

    def _unrouted(self, entry: Entry, event: rec.ShardUnrouted) -> None:
        pipeline = self._of(entry)
        self._check_generation(entry, pipeline, event.generation)
        pipeline.routed.pop(event.shard, None)

    def _check_generation(self, entry: Entry, pipeline: _Pipeline, generation: int) -> None:
        if generation <= pipeline.generation:
            self._bad(7, f"{entry.source}: the router's generation went from {pipeline.generation} to {generation}")
        pipeline.generation = generation

    def _slept(self, entry: Entry, event: rec.ShardSlept) -> None:
        pipeline, shard = self._of(entry), event.shard
        if pipeline.running.get(shard):
            self._bad(7, f"{entry.source}: shard {shard} sleeps with {len(pipeline.running[shard])} requests running")
        if shard in pipeline.routed:
            self._bad(7, f"{entry.source}: shard {shard} sleeps while it is routed")
        pipeline.awake.discard(shard)
        pipeline.loaded.pop(shard, None)

    def _woken(self, entry: Entry, event: rec.ShardWoken) -> None:
        self._of(entry).awake.add(event.shard)

    def _sync_started(self, entry: Entry, event: rec.SyncStarted) -> None:
        self._of(entry).syncs[event.sync_id] = event.targets

    def _synced(self, entry: Entry, event: rec.SyncFinished) -> None:
        pipeline = self._of(entry)
        targets = pipeline.syncs.pop(event.sync_id, ())
        if event.outcome == "done":
            for shard in targets:
                pipeline.loaded[shard] = event.version

    def _submitted(self, entry: Entry, event: rec.RequestSubmitted) -> None:
        if self._inside_its_job(entry, f"sends request {event.request_id}", 7):
            return
        pipeline = self._of(entry)
        if event.shard not in pipeline.routed:
            what = f"request {event.request_id} goes to shard {event.shard}, which takes no requests"
            self._bad(7, f"{entry.source}: {what}")
        pipeline.running.setdefault(event.shard, set()).add(event.request_id)

    def _finished(self, entry: Entry, event: rec.RequestFinished) -> None:
        pipeline = self._of(entry)
        pipeline.running.get(event.shard, set()).discard(event.request_id)

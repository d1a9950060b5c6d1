"""A streaming run on a virtual clock: the real prompt queue and samplers, an engine and a trainer that only take time.

Rollouts last as long as a seed says, fail, are given up; the run crashes and goes on from its last checkpoint. After
every event the queue's permits are counted; at the end every prompt is accounted for, and the scheduler's history
checker reads the record.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from typing import Any

from nemo_rl.experience.prompt_queue import Drawn, PromptQueue, QueueLimits
from nemo_rl.experience.prompts import GroupKey, group_name
from nemo_rl.experience.samplers import InOrder, ReadyFirst, Sampler, SlotStatus, WeightFifo, Windowed
from nemo_rl.time_sharing.history.checker import check
from nemo_rl.utils.record import MemoryRecord
from nemo_rl.utils.record_events import (
    GroupAdmitted,
    GroupCommitted,
    GroupDropped,
    GroupTrained,
    RecordedSpan,
    RequestFinished,
    RequestSubmitted,
    StepBegun,
    StepFinished,
    SyncFinished,
    SyncStarted,
    TokensGenerated,
    WaitBegun,
    WaitEnded,
)


@dataclass(frozen=True)
class Saved:
    """A checkpoint: what the collector writes."""

    version: int
    batches: tuple[tuple[int, int, dict[int, GroupKey]], ...] = ()
    ready: tuple[tuple[GroupKey, int], ...] = ()
    loader_at: int = 0


@dataclass
class Outcome:
    """What a simulated run came to.

    Attributes:
        trained: Prompts that were trained, in that order; those of steps that a crash lost are not among them.
        failed: Prompts that were given up.
        left: Prompts that were drawn and that the run's end left over.
        steps: Completed steps.
        lags: How old trained groups were.
        crashes: Lives that ended early.
        evicted: Groups that were generated anew.
    """

    trained: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    steps: int = 0
    lags: list[int] = field(default_factory=list)
    crashes: int = 0
    evicted: int = 0


class Wedged(AssertionError):
    """Nothing can happen any more, and the run is not over."""


class StreamSimulation:
    """One random schedule.

    Args:
        seed: Of everything.
    """

    def __init__(self, seed: int) -> None:
        self.random = draw = random.Random(seed)
        self.wanted = draw.randint(1, 4)
        window = draw.randint(0, 2)
        kinds: list[Sampler] = [InOrder(window), WeightFifo(window), Windowed(window), Windowed(window, True)]
        self.sampler: Sampler = draw.choice([*kinds, ReadyFirst(window)])
        self.batches = draw.randint(1, 5)
        steps = draw.randint(1, 6)
        self.limits = QueueLimits(
            wanted=self.wanted,
            last_step=min(steps, self.batches),
            capacity=self.wanted * (self.sampler.window() + 1) + draw.randint(0, 4),
            max_inflight=draw.choice([None, 1, 2, 5]),
            min_fraction=0.01,
            replaces=draw.random() < 0.5,
        )
        self.least = draw.randint(1, self.wanted)
        self.fail_rate = draw.choice([0.0, 0.0, 0.2])
        self.crash_rate = draw.choice([0.0, 0.0, 0.15])
        self.save_period = draw.randint(1, 2)
        self.durations = draw.choice([lambda: draw.expovariate(1.0), lambda: 1.0, lambda: draw.paretovariate(1.2)])
        self.train_s = draw.choice([0.0, 0.3, 3.0])
        self.sync_s = draw.choice([0.0, 1.0])
        self.store_s = draw.choice([0.0, 0.0, 1.0])
        self.draws_ahead = draw.random() < 0.5
        self.outcome = Outcome()
        self.saved = Saved(0)
        # What the last checkpoint knows of what is trained and given up.
        self.safe = Outcome()

    def run(self) -> Outcome:
        """Lives until the run is over."""
        while not self._live():
            self.outcome.crashes += 1
            self.outcome.trained, self.outcome.failed = list(self.safe.trained), list(self.safe.failed)
            self.outcome.steps = self.safe.steps
        return self.outcome

    # One life.

    def _live(self) -> bool:
        self.now, self.heap, self.generation = 0.0, [], {}
        self.record = MemoryRecord(source="run/driver", clock=lambda: self.now)
        self.queue = PromptQueue(self.sampler, self.limits, self.saved.version)
        self.loader_at = self.saved.loader_at
        self.restored = list(self.saved.batches)
        self.ready_before = dict(self.saved.ready)
        self.prompt_of: dict[GroupKey, int] = {}
        self.befores: dict[int, int] = {}
        self.running: set[GroupKey] = set()
        self.storing: set[GroupKey] = set()
        ended = self._train_to_end()
        if not ended:
            self._check_record(ended=False)
            return False
        for key in [*self.prompt_of]:
            self.outcome.left.append(self.prompt_of.pop(key))
            self._request_ends(key, "aborted")
            self.record.emit(GroupDropped(group_name(key), "end_of_run"))
        self._check_record(ended=True)
        return True

    def _check_record(self, *, ended: bool) -> None:
        if self.record.entries:
            found = check(self.record.entries, ended=ended)
            assert not found, found[0]

    def _train_to_end(self) -> bool:
        self._publish()
        while self.queue.version < self.limits.last_step:
            step = self.queue.version
            self.record.emit(StepBegun(step))
            while True:
                keys = self._take()
                if not keys:
                    break
                self._train(keys)
            if not self.queue.step.taken:
                return True
            for key in self.queue.step.taken:
                self.outcome.lags.append(step - self.generation[key])
            if self.draws_ahead:
                self._draw(ahead=True)
            done = self.queue.finish_step()
            for key in done.taken:
                self.record.emit(GroupTrained(group_name(key), step))
                self.outcome.trained.append(self.prompt_of.pop(key))
            self.record.emit(StepFinished(step, step + 1, len(done.taken)))
            self.outcome.steps += 1
            # Rollouts go on, and begin, below the refit.
            self._pass(self.sync_s)
            self._publish()
            if self.outcome.steps % self.save_period == 0:
                self._save()
            if self.random.random() < self.crash_rate:
                return False
        return True

    def _publish(self) -> None:
        self.published = version = self.queue.version
        self.record.emit(SyncStarted(f"v{version}", version, (0,)))
        self.record.emit(SyncFinished(f"v{version}", version))
        self._pump()

    def _evict(self) -> None:
        # What is being stored is not touched until it is ready.
        for key in [key for key in self.queue.stale() if key not in self.storing]:
            self._request_ends(key, "aborted")
            fresh = self.queue.again(key)
            self.prompt_of[fresh] = self.prompt_of.pop(key)
            self.record.emit(GroupDropped(group_name(key), "stale"))
            self.record.emit(GroupAdmitted(group_name(fresh), str(self.prompt_of[fresh]), 1))
            self.outcome.evicted += 1

    def _pump(self) -> None:
        self._evict()
        while self.restored:
            batch, rows, left = self.restored.pop(0)
            self.befores[batch] = self.loader_at
            self.queue.restore(batch, rows, left)
            for row, key in left.items():
                self._admit(key, self.loader_at * self.wanted + row)
                if key in self.ready_before:
                    self.generation[key] = self.ready_before[key]
                    self.queue.launched(key, self.ready_before[key])
                    self.record.emit(GroupCommitted(group_name(key), self.ready_before[key], 5, restored=True))
                    self.queue.ready(key)
            self.loader_at += 1
        self._draw()
        self._launch()

    def _draw(self, *, ahead: bool = False) -> None:
        while self.queue.wants_batch(ahead=ahead):
            if self.loader_at == self.batches:
                self.queue.exhausted = True
                break
            keys = self.queue.draw(self.wanted)
            self.befores[keys[0].target] = self.loader_at
            for row, key in enumerate(keys):
                self._admit(key, self.loader_at * self.wanted + row)
            self.loader_at += 1

    def _launch(self) -> None:
        for key in self.queue.to_launch(self.published):
            self.queue.launched(key, self.published)
            self.generation[key] = self.published
            self._later(key)
            self._request_begins(key)
        self._permits_balance()

    def _request_begins(self, key: GroupKey) -> None:
        self.running.add(key)
        self.record.emit(RequestSubmitted(group_name(key), 0, group_name(key)))

    def _request_ends(self, key: GroupKey, outcome: str, tokens: int = 0) -> None:
        if key in self.running:
            self.running.remove(key)
            self.record.emit(RequestFinished(group_name(key), 0, outcome, tokens))

    def _admit(self, key: GroupKey, prompt: int) -> None:
        self.prompt_of[key] = prompt
        self.record.emit(GroupAdmitted(group_name(key), str(prompt), 1))

    def _later(self, key: GroupKey) -> None:
        heapq.heappush(self.heap, (self.now + self.durations(), key))

    def _permits_balance(self) -> None:
        limits, slots = self.limits, self.queue.slots()
        assert self.queue.live() <= limits.capacity
        assert limits.max_inflight is None or self.queue.rolling() <= limits.max_inflight
        rolling = {slot.key for slot in slots if slot.status is SlotStatus.ROLLING}
        assert rolling == {key for _, key in self.heap if key in self.prompt_of}
        places = [slot.place for slot in slots]
        assert len(places) == len(set(places)), "two groups in one place"

    def _next_event(self) -> None:
        if not self.heap:
            raise Wedged(f"step {self.queue.step} waits, {self.queue.slots()}")
        self.now, key = heapq.heappop(self.heap)
        if key not in self.prompt_of:
            return
        if key in self.storing:
            self._stored(key)
        elif self.random.random() < self.fail_rate:
            if self.queue.failed(key) < 2:
                self._later(key)
                return
            self._request_ends(key, "failed")
            self.queue.give_up(key)
            self.outcome.failed.append(self.prompt_of.pop(key))
            self.record.emit(GroupDropped(group_name(key), "failed"))
        else:
            self._finished(key)
        self._launch()

    def _finished(self, key: GroupKey) -> None:
        version = self.generation[key]
        self._request_ends(key, "done", 5)
        self.record.emit(TokensGenerated(group_name(key), group_name(key), (RecordedSpan(version, 0, 5),)))
        self.storing.add(key)
        if self.store_s:
            heapq.heappush(self.heap, (self.now + self.store_s, key))
        else:
            self._stored(key)

    def _stored(self, key: GroupKey) -> None:
        self.storing.discard(key)
        self.record.emit(GroupCommitted(group_name(key), self.generation[key], 5))
        self.queue.ready(key)

    def _take(self) -> list[GroupKey]:
        wait = f"step {self.queue.version}"
        self.record.emit(WaitBegun(wait, wait, self.now + 1e9))
        while True:
            self._pump()
            keys = self.queue.select(lambda keys: len(keys) >= self.least)
            if keys is not None:
                self.record.emit(WaitEnded(wait, "done"))
                return keys
            self._next_event()

    def _train(self, keys: list[GroupKey]) -> None:
        """Rollouts go on while the part trains."""
        self._pass(self.train_s * len(keys))

    def _pass(self, seconds: float) -> None:
        ends = self.now + seconds
        while self.heap and self.heap[0][0] <= ends:
            self._next_event()
        self.now = ends

    def _save(self) -> None:
        drawn: list[Drawn] = self.queue.drawn()
        ready = [(slot.key, self.generation[slot.key]) for slot in self.queue.slots() if slot.ready]
        at = self.befores[drawn[0].batch] if drawn else self.loader_at
        batches = tuple((one.batch, one.rows, dict(one.open)) for one in drawn) + tuple(self.restored)
        kept = tuple(pair for pair in ready if self.random.random() < 0.8)
        self.saved = Saved(self.queue.version, batches, kept, at)
        self.safe = Outcome(list(self.outcome.trained), list(self.outcome.failed), steps=self.outcome.steps)


def prompts_of(simulation: StreamSimulation) -> Any:
    """Every prompt that the run could draw."""
    return set(range(simulation.batches * simulation.wanted))

"""Simulated generation of one job: shards that decode many samples at once, and the router in front of them.

A shard with n running requests advances each of them at `tokens_per_s / (1 + n / half_batch)`, so the rate of a shard
saturates and a batch never ends before its longest sample. Tokens are stamped with the weights that the shard really
holds, which is the truth the checker judges stamps by. Where several jobs use a GPU at once, each slows the others
(`Crowding`).
"""

from __future__ import annotations

import heapq
import math
import random
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from nemo_rl.time_sharing.simulation.event_loop import Loop
from nemo_rl.time_sharing.simulation.scenario import EngineSpeed, ScenarioJob
from nemo_rl.utils.record import Record
from nemo_rl.utils.record_events import RecordedSpan, RequestFinished, RequestSubmitted, TokensGenerated

_SICK = 0.2
"""The part of its normal rate under which a shard counts as broken."""


@dataclass(slots=True)
class Sample:
    """One completion to be generated: `length` tokens in `turns` equal turns, `done` of them there; `spans` say under
    which weights. One of no `group` is for validation; one of an `adapter` keeps the version of it with which its
    request began.
    """

    name: str
    group: str
    length: int
    turns: int = 1
    turn: int = 1
    done: int = 0
    spans: list[RecordedSpan] = field(default_factory=list)
    mixed_kv: bool = False
    request: str = ""
    attempts: int = 0
    done_before: int = 0
    adapter: str = ""
    version: int = -1

    @classmethod
    def drawn(cls, name: str, group: str, job: ScenarioJob, rng: random.Random) -> Sample:
        """A sample of a length as the job's are."""
        tokens = job.tokens
        length = min(max(int(rng.lognormvariate(math.log(tokens.median), tokens.sigma)), 1), tokens.max)
        return cls(name, group, length, min(job.turns, length))

    @property
    def until(self) -> int:
        """Tokens that are there when the present turn is over."""
        return self.length * self.turn // self.turns


@dataclass(slots=True)
class SimulatedShard:
    """One engine. `progress` counts the tokens that a request present all along would have got; a request ends at its
    own mark on that scale. `crowded`: how many times as long everything takes for what else is on its GPUs.
    """

    rank: int
    gpus: tuple[int, ...]
    active: bool = False
    version: int = -1
    speed: float = 1.0
    at_work: bool = False
    crowded: float = 1.0
    progress: float = 0.0
    updated: float = 0.0
    running: dict[str, tuple[Sample, float]] = field(default_factory=dict)
    marks: list[tuple[float, int, int, Sample]] = field(default_factory=list)
    timer: int = 0


class Generation:
    """All shards of a job, each on its GPUs, and the queue before them. `finished` is called with each complete sample,
    `turn_over` with one whose next turn waits for its environment.
    """

    def __init__(
        self,
        loop: Loop,
        crowding: Crowding,
        engine: EngineSpeed,
        ranks: Sequence[tuple[int, ...]],
        record: Record,
        finished: Callable[[Sample], None],
        turn_over: Callable[[Sample], None],
    ) -> None:
        self.shards = [SimulatedShard(rank, gpus) for rank, gpus in enumerate(ranks)]
        self.queue: deque[Sample] = deque()
        self.busy_rank_s = 0.0
        self._loop, self._engine, self._record = loop, engine, record
        self._finished, self._turn_over = finished, turn_over
        self._crowding = crowding
        self._requests = 0

    def submit(self, samples: list[Sample]) -> None:
        """Adds samples to be generated."""
        self.queue.extend(samples)
        self._dispatch()

    @property
    def under_way(self) -> int:
        """Requests that run, or wait for a shard."""
        return len(self.queue) + sum(len(shard.running) for shard in self.shards)

    def set_active(self, rank: int, active: bool) -> None:
        """Changes routing; a newly active shard takes its share of the running requests."""
        self.shards[rank].active = active
        if active:
            self._rebalance(self.shards[rank])
            self._dispatch()

    def preempt(self, rank: int) -> None:
        """Ends every request of a shard; their tokens are kept and the rest is generated elsewhere, or later."""
        shard = self.shards[rank]
        self._advance(shard)
        for sample, start in list(shard.running.values()):
            self._stop(shard, sample, start, "preempted")
            self.queue.appendleft(sample)
        self._arm(shard)
        self._dispatch()

    def load(self, rank: int, version: int) -> None:
        """New weights in a shard. Requests that run across it keep their KV entries, computed by the old ones."""
        shard = self.shards[rank]
        self._advance(shard)
        for name, (sample, start) in list(shard.running.items()):
            self._close_span(shard, sample, start)
            sample.mixed_kv = sample.mixed_kv or (sample.done > 0 and version != shard.version)
            shard.running[name] = (sample, shard.progress)
        shard.version = version

    def set_speed(self, rank: int, speed: float) -> None:
        """1 is normal, 0 is stuck."""
        shard = self.shards[rank]
        self._advance(shard)
        shard.speed = speed
        self._arm(shard)

    def stalled(self) -> list[int]:
        """Active shards whose requests make no progress, or so little that a host which compares rates would see it."""
        return [shard.rank for shard in self.shards if shard.active and shard.running and shard.speed < _SICK]

    def cancel(self) -> None:
        """Drops all that is being generated."""
        self.queue.clear()
        for shard in self.shards:
            self._advance(shard)
            for sample, start in list(shard.running.values()):
                self._stop(shard, sample, start, "aborted")
            self._note_work(shard)
            shard.timer += 1

    def drop_all(self) -> None:
        """The job is gone: everything it was generating is lost."""
        self.cancel()
        for shard in self.shards:
            shard.active = False

    def _rate(self, shard: SimulatedShard) -> float:
        alone = self._engine.tokens_per_s / (1.0 + len(shard.running) / self._engine.half_batch)
        return shard.speed * alone / shard.crowded

    def _note_work(self, shard: SimulatedShard) -> None:
        """Updates the crowding of its GPUs when a shard begins or ends its work."""
        if shard.at_work == bool(shard.running):
            return
        shard.at_work, who = not shard.at_work, (id(self), shard.rank)
        if shard.at_work:
            shard.crowded = self._crowding.factor(who, shard.gpus)
            self._crowding.begin(who, shard.gpus, lambda: self._crowded(shard))
        else:
            self._crowding.end(who, shard.gpus)

    def _crowded(self, shard: SimulatedShard) -> None:
        self._advance(shard)
        shard.crowded = self._crowding.factor((id(self), shard.rank), shard.gpus)
        self._arm(shard)

    def _advance(self, shard: SimulatedShard) -> None:
        elapsed = self._loop.now - shard.updated
        if elapsed > 0:
            if shard.running:
                shard.progress += elapsed * self._rate(shard)
                self.busy_rank_s += elapsed
            shard.updated = self._loop.now

    def _dispatch(self) -> None:
        """Assigns queued samples to the least loaded shards up to `max_running`; the rest stays queued."""
        if not self.queue:
            return
        loads = [
            (len(shard.running), shard.rank)
            for shard in self.shards
            if shard.active and len(shard.running) < self._engine.max_running
        ]
        if not loads:
            return
        heapq.heapify(loads)
        touched = set()
        while self.queue and loads:
            load, rank = heapq.heappop(loads)
            sample = self.queue.popleft()
            shard = self.shards[rank]
            if rank not in touched:
                self._advance(shard)
                touched.add(rank)
            self._start(shard, sample)
            if load + 1 < self._engine.max_running:
                heapq.heappush(loads, (load + 1, rank))
        for rank in touched:
            self._arm(self.shards[rank])

    def _start(self, shard: SimulatedShard, sample: Sample) -> None:
        self._requests += 1
        sample.attempts += 1
        sample.request = f"{sample.name}/{sample.attempts}"
        sample.done_before = sample.done
        shard.running[sample.name] = (sample, shard.progress)
        heapq.heappush(
            shard.marks, (shard.progress + sample.until - sample.done, self._requests, sample.attempts, sample)
        )
        self._record_of(sample).emit(RequestSubmitted(sample.request, shard.rank, sample.name, sample.adapter))

    def _record_of(self, sample: Sample) -> Record:
        return self._record

    def _version_of(self, shard: SimulatedShard, sample: Sample) -> int:
        return shard.version

    def _rebalance(self, new: SimulatedShard) -> None:
        """Moves requests from fuller shards until none has more than its even part."""
        active = [shard for shard in self.shards if shard.active and shard is not new]
        total = sum(len(shard.running) for shard in active)
        even = -(-total // (len(active) + 1))
        for shard in active:
            surplus = len(shard.running) - even
            if surplus <= 0:
                continue
            self._advance(shard)
            for sample, start in list(shard.running.values())[:surplus]:
                self._stop(shard, sample, start, "preempted")
                self.queue.append(sample)
            self._arm(shard)

    def _stop(self, shard: SimulatedShard, sample: Sample, start: float, outcome: str) -> None:
        self._close_span(shard, sample, start, whole=outcome == "done")
        del shard.running[sample.name]
        finished = RequestFinished(sample.request, shard.rank, outcome, sample.done - sample.done_before)
        self._record_of(sample).emit(finished)

    def _close_span(self, shard: SimulatedShard, sample: Sample, start: float, *, whole: bool = False) -> None:
        done = sample.until if whole else min(sample.done + int(shard.progress - start + 1e-6), sample.until - 1)
        if done > sample.done:
            last = sample.spans[-1] if sample.spans else None
            version = self._version_of(shard, sample)
            if last is not None and last.version == version and last.end == sample.done:
                sample.spans[-1] = RecordedSpan(version, last.start, done)
            else:
                sample.spans.append(RecordedSpan(version, sample.done, done))
            sample.done = done

    def _arm(self, shard: SimulatedShard) -> None:
        self._note_work(shard)
        shard.timer += 1
        marks = shard.marks
        while marks and self._outdated(shard, marks[0]):
            heapq.heappop(marks)
        rate = self._rate(shard)
        if marks and rate > 0:
            self._loop.after(max(marks[0][0] - shard.progress, 0.0) / rate, self._complete, shard, shard.timer)

    def _outdated(self, shard: SimulatedShard, mark: tuple[float, int, int, Sample]) -> bool:
        _, _, attempt, sample = mark
        return sample.attempts != attempt or sample.name not in shard.running

    def _complete(self, shard: SimulatedShard, timer: int) -> None:
        if timer != shard.timer:
            return
        self._advance(shard)
        done = []
        while shard.marks and (self._outdated(shard, shard.marks[0]) or shard.marks[0][0] <= shard.progress + 1e-6):
            mark = heapq.heappop(shard.marks)
            if not self._outdated(shard, mark):
                done.append(mark[3])
        for sample in done:
            _, start = shard.running[sample.name]
            self._stop(shard, sample, start, "done")
            if sample.group and sample.turn == sample.turns:
                drawn = TokensGenerated(
                    sample.name, sample.group, tuple(sample.spans), sample.mixed_kv, adapter=sample.adapter
                )
                self._record_of(sample).emit(drawn)
        self._dispatch()
        self._arm(shard)
        for sample in done:
            if sample.turn == sample.turns:
                self._finished(sample)
            else:
                sample.turn += 1
                self._turn_over(sample)


class Crowding:
    """Work in progress on each GPU. Beside n others a piece of work takes 1 + n x `slows` times as long."""

    def __init__(self, slows: float) -> None:
        self._slows = slows
        self._at_work: dict[int, dict[Hashable, Callable[[], None]]] = defaultdict(dict)

    def begin(self, who: Hashable, gpus: Sequence[int], changed: Callable[[], None] = lambda: None) -> None:
        """Work begins on GPUs. `changed`: called whenever its `factor` may be another from now on."""
        for gpu in gpus if self._slows else ():
            self._at_work[gpu][who] = changed
        self._tell(who, gpus)

    def end(self, who: Hashable, gpus: Sequence[int]) -> None:
        """The work is over, or had not begun."""
        for gpu in gpus:
            self._at_work[gpu].pop(who, None)
        self._tell(who, gpus)

    def factor(self, who: Hashable, gpus: Sequence[int]) -> float:
        """How many times as long as alone work takes here now: that on the fullest of its GPUs counts."""
        return 1.0 + self._slows * max(len(self._at_work[gpu].keys() - {who}) for gpu in gpus)

    def _tell(self, who: Hashable, gpus: Sequence[int]) -> None:
        others = {other: changed for gpu in gpus for other, changed in self._at_work[gpu].items() if other != who}
        for changed in others.values():
            changed()

"""The simulated cluster: the real scheduler and agents, the wire between them, the reaper, and everything that goes
wrong.

Deterministic by seed. The record it leaves is one log with every source in it, in the order in which things happened,
so that the checker needs no other truth.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from typing_extensions import override

from nemo_rl.time_sharing.agents.agent import LocalPhase
from nemo_rl.time_sharing.log.events import MemoryFreed, PlanRejected
from nemo_rl.time_sharing.log.segments import MUST_LAST
from nemo_rl.time_sharing.log.state import replay
from nemo_rl.time_sharing.planning import planner
from nemo_rl.time_sharing.planning.job_placement import Mapped
from nemo_rl.time_sharing.planning.plan import Plan, Snapshot
from nemo_rl.time_sharing.planning.validator import Validator, validate
from nemo_rl.time_sharing.protocol.topology import Topology
from nemo_rl.time_sharing.protocol.types import (
    UNMEASURED_RANK_BATCH,
    Answer,
    Command,
    CommandOutcome,
    Reply,
    Status,
    Verb,
)
from nemo_rl.time_sharing.scheduling.liveness import SteadyClock
from nemo_rl.time_sharing.scheduling.scheduler import PlanRule, Scheduler, StillRegistered
from nemo_rl.time_sharing.simulation.baselines import BatchQueue
from nemo_rl.time_sharing.simulation.event_loop import LogCopy, Wire, saved_state_of
from nemo_rl.time_sharing.simulation.job_process import JobProcess, Surroundings
from nemo_rl.time_sharing.simulation.jobs import SimulatedJob
from nemo_rl.time_sharing.simulation.scenario import Absence, Scenario, ScenarioJob
from nemo_rl.time_sharing.simulation.simulated_teachers import jobs_of
from nemo_rl.time_sharing.simulation.watch import SchedulerWatch
from nemo_rl.utils.record import Entry, Record

_BOTH_WAYS = (Wire.TO, Wire.FROM)
_JUMPS = (-3600.0, -1.0, 20.0, 86400.0)


@dataclass(slots=True)
class _Memory:
    """GPU memory of a dead owner, which only the reaper frees."""

    source: str
    what: str
    gpus: tuple[int, ...]


class World(Surroundings):
    """One simulation. `record` gets every event; `rule` is the planner, `validator` judges its plans. With a
    `queue`, jobs start when and where that says, instead of when they come.
    """

    def __init__(
        self,
        scenario: Scenario,
        seed: int,
        make_record: Callable[[Callable[[], float]], Record],
        *,
        rule: PlanRule = planner.plan,
        validator: Validator = validate,
        queue: BatchQueue | None = None,
    ) -> None:
        super().__init__(scenario, seed, make_record)
        self.rng = random.Random(f"{seed}/world")
        self.jobs = jobs_of(scenario, self)
        self.open_jobs = len(self.jobs)
        self._rule, self._validator, self._queue = rule, validator, queue
        self._clock = SteadyClock(max_step_s=self.limits.max_tick_s)
        self._log = LogCopy(self._record.bind("scheduler", clock=lambda: self._clock.now), lambda: self._clock.now)
        self._jump = 0.0
        self._log_is_complete = True
        self._scheduler: Scheduler | None = None
        self._tick_at = float("inf")
        self._watch = SchedulerWatch(self.limits, self._log.entries, 0.0, 0.0)
        self._orphans: dict[tuple[str, int], list[_Memory]] = {}
        self.strikes: dict[str, int] = {}
        self._gone: set[int] = set()
        self._waiting: list[SimulatedJob] = []

    def run(self, *, max_events: int | None = None) -> None:
        """Runs until every job has ended, or the horizon."""
        self._scheduler = Scheduler(
            self._log, self._send_command, self._clock, notify=self._send_reply, rule=self._plan
        )
        self._scheduler.open(self.scenario.gpu_pool, self.limits, self._reading())
        if nodes := self.scenario.quota_nodes:
            self._scheduler.set_quotas(nodes, self.scenario.half_life_hours * 3600.0, self._reading())
        for job in self.jobs.values():
            self.loop.at(job.job.arrive_s, self._arrive, job)
            if job.job.leaves_s is not None:
                self.loop.at(job.job.leaves_s, job.stop)
        self._arm(0.0)
        self._plan_faults()
        for absence in self.scenario.absences:
            self.loop.at(absence.notice_at_s, self._node_drains, absence)
            if absence.returns_at_s is not None:
                self.loop.at(absence.returns_at_s, self._node_comes, absence)
        self.loop.run(self.scenario.horizon_s, max_events)

    def _plan(self, snapshot: Snapshot, now: float) -> Plan:
        """Plans by the rule; the validator's problems go into the log, where the checker finds them."""
        plan = self._rule(snapshot, now)
        if problems := self._validator(snapshot, plan):
            self._log.emit(PlanRejected(tuple(dict.fromkeys(problems))))
        return plan

    @property
    def entries(self) -> list[Entry]:
        """The scheduler's own log."""
        return self._log.entries

    def _arrive(self, job: SimulatedJob) -> None:
        if self._queue is None:
            if job.job.placed:
                job.job = self._moved(job) or job.job
            job.arrive()
        else:
            self._queue.submit(job.job)
            self._start_queued()

    def _moved(self, job: SimulatedJob) -> ScenarioJob | None:
        jobs = (j for j in self.jobs.values() if j is not job and j.first_seen is not None and j.finished_at is None)
        there = [Mapped(j.job.train, j.job.infer) for j in jobs]
        return job.job.moved(there, self.scenario.gpu_pool.slots, self._gone)

    @override
    def place(self, name: str) -> bool:
        job = self.jobs[name]
        if self._gone.isdisjoint(job.job.train):
            return True
        if job.job.placed and (moved := self._moved(job)) is not None:
            job.job = moved
            return True
        self._waiting.append(job)
        return False

    # Nodes. A scheduler that is down hears of them when it is back.

    def _node_drains(self, absence: Absence) -> None:
        if self._scheduler is None:
            self.loop.after(1.0, self._node_drains, absence)
            return
        left_s = max(absence.leaves_at_s - self.loop.now, 0.0)
        self._scheduler.drain_node(absence.node, self._reading(), left_s)
        self._gone |= self.scenario.gpu_pool.units_of([absence.node])
        for job in self.jobs.values():
            if not self._gone.isdisjoint(job.job.train):
                job.move()
        self.loop.after(left_s, self._node_leaves, absence)

    def _node_leaves(self, absence: Absence) -> None:
        back = absence.returns_at_s is not None and self.loop.now >= absence.returns_at_s
        if not back and (self._scheduler is None or not self._scheduler.node_leaves(absence.node, self._reading())):
            self.loop.after(1.0, self._node_leaves, absence)
            return
        units = self.scenario.gpu_pool.units_of([absence.node])
        for process in (job.process for job in self.jobs.values() if job.process is not None and not back):
            ranks = process.agent.topology.ranks
            process.started_ranks -= {rank for rank in process.started_ranks if not units.isdisjoint(ranks[rank])}

    def _node_comes(self, absence: Absence) -> None:
        if self._scheduler is None:
            self.loop.after(1.0, self._node_comes, absence)
            return
        self._scheduler.node_comes(absence.node, self._reading())
        self._gone -= self.scenario.gpu_pool.units_of([absence.node])
        waiting, self._waiting = self._waiting, list[SimulatedJob]()
        for job in waiting:
            job.arrive()

    def _start_queued(self) -> None:
        if self._queue is not None:
            for placed in self._queue.start(self.loop.now):
                job = self.jobs[placed.name]
                job.job = placed
                job.arrive()

    @override
    def job_ended(self, name: str) -> None:
        self.open_jobs -= 1
        if self._queue is not None:
            self._queue.ended(name)
            self._start_queued()
        if self.open_jobs == 0:
            longest_end_s = 4 * self.limits.lease_s + 4 * self.limits.reap_s
            self.loop.after(self.limits.heartbeat_s, self._stop_if_done, self.loop.now + longest_end_s)

    def _stop_if_done(self, at_the_latest: float) -> None:
        """The run is over when the scheduler knows no pipeline any more; a scheduler that never gets there is cut short
        for the checker to see.
        """
        all_unregistered = self._scheduler is not None and not self._scheduler.state.pipelines
        if all_unregistered or self.loop.now >= at_the_latest:
            self.loop.stopped = True
        else:
            self.loop.after(self.limits.heartbeat_s, self._stop_if_done, at_the_latest)

    # The wire.

    @override
    def register(self, spec: ScenarioJob, incarnation: int) -> Topology | None:
        scheduler = self._scheduler
        if scheduler is None or any(self.wire.is_cut(way, spec.name) for way in _BOTH_WAYS):
            return None
        try:
            topology = scheduler.register(
                spec.name,
                f"pipeline_{spec.name}_NS",
                spec.rank_sizes,
                spec.mappings,
                self._reading(),
                incarnation=incarnation,
                rank_batch=UNMEASURED_RANK_BATCH if spec.measures_batch else spec.engine.good_batch,
                group=self.scenario.users[spec.user].parent if spec.user else "",
                **spec.options,
            )
        except StillRegistered:
            return None
        finally:
            self._arm(self.loop.now)
        return topology

    @override
    def to_scheduler_status(self, name: str, status: Status) -> None:
        self.wire.send(Wire.FROM, name, self._on_status, status)

    @override
    def to_scheduler_answer(self, name: str, answer: Answer) -> None:
        self.wire.send(Wire.FROM, name, self._on_answer, answer)

    def _on_status(self, status: Status) -> None:
        if self._scheduler is not None:
            state, watch = self._scheduler.state, self._watch
            began = watch.status_comes(state, status, self._clock.steady(self._reading()))
            reply = self._scheduler.status(status, self._reading())
            watch.status_taken(state, status, began)
            self._send_reply(reply)
            self._arm(self.loop.now + self.limits.plan_interval_s)

    def _on_answer(self, answer: Answer) -> None:
        if self._scheduler is not None:
            self._scheduler.answer(answer, self._reading())

    def _send_reply(self, reply: Reply) -> None:
        self.wire.send(Wire.TO, reply.pipeline, self.jobs[reply.pipeline].hear, reply)

    def _send_command(self, command: Command) -> None:
        if command.verb is Verb.REAP:
            self.loop.after(self.scenario.costs.reap_s, self._reap, command)
        else:
            self.wire.send(Wire.TO, command.pipeline, self.jobs[command.pipeline].obey, command)

    def _reading(self) -> float:
        return self.loop.now + self._jump

    def _arm(self, at: float) -> None:
        if at < self._tick_at - 1e-9:
            self._tick_at = at
            self.loop.at(at, self._tick, at)

    def _tick(self, at: float) -> None:
        if at != self._tick_at:
            return
        self._tick_at = float("inf")
        if self._scheduler is not None:
            due = self._scheduler.tick(self._reading())
            self._watch.observe(self._scheduler.state, self._clock.now, self.loop.now)
            self._arm(self.loop.now + min(max(due - self._clock.now, 0.01), 1.0))

    # The reaper: a daemon on each node that ends processes and shows that their memory is free.

    def _reap(self, command: Command) -> None:
        job = self.jobs[command.pipeline]
        failed = self.rng.random() < self.scenario.faults.reap_fails
        if not failed:
            alive = job.process is not None and job.process.incarnation == command.incarnation
            if alive and command.rank >= 0:
                self._end_rank(job, command.rank)
            elif alive:
                job.crash("fenced")
            what = f"rank {command.rank}" if command.rank >= 0 else None
            self._free_orphans((job.job.name, command.incarnation), what)
        outcome = CommandOutcome.FAILED if failed else CommandOutcome.DONE
        answer = Answer(command.command, command.pipeline, command.incarnation, outcome)
        self.loop.after(0.1, self._on_answer, answer)

    def _end_rank(self, job: SimulatedJob, rank: int) -> None:
        process = job.process
        if process is not None and process.agent.ranks[rank].phase is not LocalPhase.ASLEEP:
            # Dead before its requests go elsewhere, or some would be sent to it again.
            process.generation.set_active(rank, False)
            process.generation.preempt(rank)
            process.started_ranks.discard(rank)
            process.record.emit(MemoryFreed(f"rank {rank}", process.agent.topology.ranks[rank]))
            process.watch.rank_ended(rank)
            process.agent.rank_ended(rank)

    @override
    def leave_orphans(self, name: str, process: JobProcess) -> None:
        orphans = [_Memory(f"{name}/driver", cluster, held.gpus) for cluster, held in process.agent.holds.items()]
        orphans += [
            _Memory(f"{name}/driver", f"rank {i}", process.agent.topology.ranks[i])
            for i, rank in enumerate(process.agent.ranks)
            if rank.phase is not LocalPhase.ASLEEP
        ]
        self._orphans.setdefault((name, process.incarnation), []).extend(orphans)

    def _free_orphans(self, whose: tuple[str, int], what: str | None) -> None:
        orphans = self._orphans.pop(whose, [])
        for orphan in orphans:
            if what in (None, orphan.what):
                self._record.bind(orphan.source).emit(MemoryFreed(orphan.what, orphan.gpus))
        self._orphans[whose] = [orphan for orphan in orphans if what not in (None, orphan.what)]

    # Faults.

    def _plan_faults(self) -> None:
        faults = self.scenario.faults
        for kind, rate, strike in (
            ("agent crashes", faults.agent_crashes, self._strike_agent),
            ("scheduler crashes", faults.scheduler_crashes, self._strike_scheduler),
            ("cancels", faults.cancels, self._strike_cancel),
            ("drains", faults.drains, self._strike_drain),
            ("withdrawals", faults.withdrawals, lambda: (job := self._some_job()) is not None and job.take_back()),
            ("partitions", faults.partitions, lambda: self._cut_off_one(*_BOTH_WAYS)),
            ("one-way partitions", faults.one_way_partitions, lambda: self._cut_off_one(self.rng.choice(_BOTH_WAYS))),
            ("outages", faults.outages, self._strike_outage),
            ("stuck shards", faults.stuck_shards, lambda: self._set_speed(0.0)),
            ("slow shards", faults.slow_shards, lambda: self._set_speed(0.05)),
            ("clock jumps", faults.clock_jumps, self._strike_clock),
        ):
            if rate:
                self._next_strike(kind, rate, strike)

    def _next_strike(self, kind: str, rate: float, strike: Callable[[], bool]) -> None:
        wait = self.rng.expovariate(rate / 3600.0)
        if self.loop.now + wait < self.scenario.faults.until_s:
            self.loop.after(wait, self._strike, kind, rate, strike)

    def _strike(self, kind: str, rate: float, strike: Callable[[], bool]) -> None:
        if self.open_jobs:
            if strike():
                self.strikes[kind] = self.strikes.get(kind, 0) + 1
            self._next_strike(kind, rate, strike)

    def _some_job(self) -> SimulatedJob | None:
        alive = [job for job in self.jobs.values() if job.process is not None]
        return self.rng.choice(alive) if alive else None

    def _strike_agent(self) -> bool:
        job = self._some_job()
        if job is not None:
            job.crash()
        return job is not None

    def _strike_scheduler(self) -> bool:
        if self._scheduler is None:
            return False
        self._scheduler = None
        if self.scenario.faults.log_losses and self.rng.random() < self.scenario.faults.log_losses:
            self.lose_log(self.rng.randint(0, self.scenario.faults.lost_entries))
        shortest = self.scenario.faults.scheduler_restart_s / 6.0
        self.loop.after(shortest * (1.0 + 5.0 * self.rng.random()), self._restart_scheduler)
        return True

    def lose_log(self, entries: int) -> None:
        """Drops the log's last entries, except those that were flushed to the disk."""
        past = self._log.entries
        on_disk = max(at for at, entry in enumerate(past) if isinstance(entry.event, MUST_LAST)) + 1
        del past[max(len(past) - entries, on_disk) :]
        self._log_is_complete = False

    def _restart_scheduler(self) -> None:
        self._clock = SteadyClock(start=max(self._clock.now, self.loop.now), max_step_s=self.limits.max_tick_s)
        self._watch = SchedulerWatch(self.limits, self._log.entries, self._clock.now, self.loop.now)
        past = list(self._log.entries)
        segment = saved_state_of(replay(past), past[-1].time)
        # Every second time the log has just gone on in a new segment.
        if len(past) % 2:
            past = [segment]
        self._scheduler = Scheduler(
            self._log, self._send_command, self._clock, notify=self._send_reply, rule=self._plan
        )
        self._scheduler.recover(past, self._reading(), complete=self._log_is_complete)
        self._watch.audit(self._scheduler.state)
        saved_state_of(self._scheduler.state, self._clock.now)
        self._log_is_complete = True
        for reply in self._scheduler.hello():
            self._send_reply(reply)
        self._tick_at = float("inf")
        self._arm(self.loop.now)

    def _strike_cancel(self) -> bool:
        job = self._some_job()
        if self._scheduler is None or job is None:
            return False
        self._scheduler.unregister(job.job.name, self._reading())
        return True

    def _strike_drain(self) -> bool:
        job = self._some_job()
        if self._scheduler is None or job is None:
            return False
        job.stopping = True
        self._scheduler.drain(job.job.name, self._reading())
        return True

    def _cut_off_one(self, *directions: str) -> bool:
        job = self._some_job()
        if job is not None:
            seconds = self.rng.random() * 2 * self.scenario.faults.partition_s
            self.wire.cut(job.job.name, directions, self.loop.now + seconds)
        return job is not None

    def _strike_outage(self) -> bool:
        until = self.loop.now + self.rng.random() * 2 * self.scenario.faults.outage_s
        everybody = self.rng.random() < 0.5
        for name in self.jobs:
            if everybody or self.rng.random() < 0.5:
                self.wire.cut(name, _BOTH_WAYS, until)
        return True

    def _set_speed(self, speed: float) -> bool:
        job = self._some_job()
        if job is None or job.process is None:
            return False
        active = [shard.rank for shard in job.process.generation.shards if shard.active]
        if active:
            job.process.generation.set_speed(self.rng.choice(active), speed)
        return bool(active)

    def _strike_clock(self) -> bool:
        self._jump += self.rng.choice(_JUMPS)
        self._watch.jumped()
        return True

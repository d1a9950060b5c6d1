"""Defects to plant: two per invariant, patched into the planner, the executor or the agent process, so that the checker can show that it bites.

All of them pass the plan validator, because they sit in what happens to a plan, or in plans that are sound and unfair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from nemo_rl.time_sharing import events as ev
from nemo_rl.time_sharing import planner
from nemo_rl.time_sharing.agent import Agent
from nemo_rl.time_sharing.board import Board
from nemo_rl.time_sharing.books import PipelineState
from nemo_rl.time_sharing.executor import Executor
from nemo_rl.time_sharing.scheduler import Scheduler
from nemo_rl.time_sharing.simulation.engines import Generation
from nemo_rl.time_sharing.simulation.jobs import SimulatedJob
from nemo_rl.time_sharing.state import SchedulerState
from nemo_rl.time_sharing.types import GivenBack, Outcome, Phase

Patch = Callable[[pytest.MonkeyPatch], None]


class Defect(NamedTuple):
    invariant: int
    name: str
    plant: Patch


def executor_grants_gpus_of_sleeping_ranks(patch: pytest.MonkeyPatch) -> None:
    def free(self: SchedulerState, gpu: int) -> bool:
        lease = self.owner[gpu]
        falling = lease is not None and lease.rank >= 0 and self.pipelines[lease.pipeline].awake[lease.rank].phase is Phase.SLEEPING
        return (lease is None or falling) and gpu not in self.quarantined

    def take(self: SchedulerState, gpus, lease) -> None:  # type: ignore[no-untyped-def]
        for gpu in gpus:
            self.owner[gpu] = lease

    patch.setattr(SchedulerState, "free", free)
    patch.setattr(SchedulerState, "take", take)


def agent_says_asleep_before_it_is(patch: pytest.MonkeyPatch) -> None:
    original = Agent._sleep

    def sleep(self, rank, command) -> None:  # type: ignore[no-untyped-def]
        self._answer(command, Outcome.DONE)
        original(self, rank, command)

    patch.setattr(Agent, "_sleep", sleep)


def agent_forgets_what_it_answered(patch: pytest.MonkeyPatch) -> None:
    def take_grant(self, command) -> None:  # type: ignore[no-untyped-def]
        self._answers.clear()
        original(self, command)
        self._answers.clear()
        if command.cluster in self.holds:
            self._host.granted(command.cluster, command.priority, command.step)

    original = Agent._take_grant
    patch.setattr(Agent, "_take_grant", take_grant)


def preemption_loses_a_request(patch: pytest.MonkeyPatch) -> None:
    original = Generation.preempt

    def preempt(self: Generation, rank: int) -> None:
        before = len(self.queue)
        original(self, rank)
        if len(self.queue) > before:
            self.queue.popleft()

    patch.setattr(Generation, "preempt", preempt)


def agent_routes_stale_weights(patch: pytest.MonkeyPatch) -> None:
    original = Agent._publish_rank

    def publish_rank(self, rank, command) -> None:  # type: ignore[no-untyped-def]
        if rank.phase is Phase.READY and rank.version < self.cached:
            rank.version = self.cached
        original(self, rank, command)

    patch.setattr(Agent, "_publish_rank", publish_rank)


def refresh_leaves_out_a_rank(patch: pytest.MonkeyPatch) -> None:
    original = Agent.refresh

    def refresh(self: Agent) -> None:
        hidden = next((rank for rank in self.ranks if rank.phase is Phase.ACTIVE), None)
        if hidden is not None:
            hidden.phase = Phase.READY
        original(self)
        if hidden is not None:
            hidden.phase = Phase.ACTIVE

    patch.setattr(Agent, "refresh", refresh)


def _admits_ahead(patch: pytest.MonkeyPatch, steps: int) -> None:
    original = SimulatedJob._next_step

    def next_step(self, life) -> None:  # type: ignore[no-untyped-def]
        job = self.job
        self.job = job.model_copy(update={"staleness": job.staleness + steps})
        original(self, life)
        self.job = job

    patch.setattr(SimulatedJob, "_next_step", next_step)


def driver_admits_one_step_too_early(patch: pytest.MonkeyPatch) -> None:
    _admits_ahead(patch, 1)


def driver_admits_everything_at_once(patch: pytest.MonkeyPatch) -> None:
    _admits_ahead(patch, 1000)


def agent_gives_back_when_the_cache_is_built(patch: pytest.MonkeyPatch) -> None:
    original = Agent.cache_built

    def cache_built(self: Agent, version: int) -> None:
        original(self, version)
        for cluster, held in self.holds.items():
            self._given_back[cluster] = GivenBack(cluster, held.epoch, self.published)
        self.send_status()

    patch.setattr(Agent, "cache_built", cache_built)


def agent_releases_before_it_publishes(patch: pytest.MonkeyPatch) -> None:
    original = Agent._publish_if_refreshed

    def publish_if_refreshed(self: Agent) -> None:
        if not self._refreshing and self.published != self.cached and "actor_train" in self.holds:
            published, self.published = self.published, self.cached
            self.release("actor_train")
            self.published = published
        original(self)

    original_release = Agent.release
    patch.setattr(Agent, "_publish_if_refreshed", publish_if_refreshed)
    patch.setattr(Agent, "release", lambda self, cluster: original_release(self, cluster) if cluster in self.holds else None)


def planner_ignores_expands_under_way(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PipelineState, "rising", lambda self: False)


def planner_ignores_planned_expands(patch: pytest.MonkeyPatch) -> None:
    def rising(self: PipelineState) -> bool:
        return any(rank.phase is Phase.WAKING for rank in self.awake.values())

    patch.setattr(PipelineState, "rising", rising)


def agent_closes_the_door_after_the_drain(patch: pytest.MonkeyPatch) -> None:
    def unroute(self, rank, index) -> None:  # type: ignore[no-untyped-def]
        original(self, rank, index)
        self._host.life.generation.set_active(index, True)

    original = Agent._unroute
    patch.setattr(Agent, "_unroute", unroute)


def agent_sleeps_without_a_drain(patch: pytest.MonkeyPatch) -> None:
    def drain(self, rank, command) -> None:  # type: ignore[no-untyped-def]
        if rank.phase is Phase.ACTIVE:
            self._unroute(rank, command.rank)
        if rank.phase is not Phase.ASLEEP:
            rank.phase = Phase.DRAINING
        self._answer(command, Outcome.DONE)

    patch.setattr(Agent, "_drain", drain)


def executor_forgets_deadlines(patch: pytest.MonkeyPatch) -> None:
    def tick(self: Executor) -> float:
        for pending in self._state.commands.values():
            pending.deadline += 1e6
        return original(self)

    original = Executor.tick
    patch.setattr(Executor, "tick", tick)


def scheduler_looks_at_its_timers_too_seldom(patch: pytest.MonkeyPatch) -> None:
    def tick(self: Scheduler, reading: float) -> float:
        timers = self._timers_due
        due = original(self, reading)
        if self._timers_due != timers:
            self._timers_due = self.clock.now + 30.0
        return due

    original = Scheduler.tick
    patch.setattr(Scheduler, "tick", tick)


def planner_keeps_no_reservations(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Board, "reserve", lambda self, gpus, reservation: None)


def planner_serves_the_newest_first(patch: pytest.MonkeyPatch) -> None:
    def newest_first(snapshot):  # type: ignore[no-untyped-def]
        return list(reversed(original(snapshot)))

    original = planner.queue
    patch.setattr(planner, "queue", newest_first)


def executor_loses_a_reaped_pipeline(patch: pytest.MonkeyPatch) -> None:
    def after_reap(self, pipeline, pending, outcome) -> None:  # type: ignore[no-untyped-def]
        emit = self._emit
        if pipeline is not None and pending.rank < 0:
            # Forgets to free what the pipeline held: the books take it back, the log does not say so.
            self._emit = lambda event: self._state.apply(event, self._now()) if isinstance(event, ev.Unregistered) else emit(event)
        original(self, pipeline, pending, outcome)
        self._emit = emit

    original = Executor._after_reap
    patch.setattr(Executor, "_after_reap", after_reap)


def agent_calls_a_failed_sleep_done(patch: pytest.MonkeyPatch) -> None:
    def answer(self, command, outcome, version=-1, detail="") -> None:  # type: ignore[no-untyped-def]
        lie = outcome is Outcome.FAILED and command.verb.value == "sleep"
        original(self, command, Outcome.DONE if lie else outcome, version, detail)

    original = Agent._answer
    patch.setattr(Agent, "_answer", answer)


DEFECTS = (
    Defect(1, "executor grants GPUs of sleeping ranks", executor_grants_gpus_of_sleeping_ranks),
    Defect(1, "agent says asleep before it is", agent_says_asleep_before_it_is),
    Defect(2, "agent forgets what it answered", agent_forgets_what_it_answered),
    Defect(2, "preemption loses a request", preemption_loses_a_request),
    Defect(3, "agent routes stale weights", agent_routes_stale_weights),
    Defect(3, "refresh leaves out a rank", refresh_leaves_out_a_rank),
    Defect(4, "driver admits one step too early", driver_admits_one_step_too_early),
    Defect(4, "driver admits everything at once", driver_admits_everything_at_once),
    Defect(5, "agent gives back when the cache is built", agent_gives_back_when_the_cache_is_built),
    Defect(5, "agent releases before it publishes", agent_releases_before_it_publishes),
    Defect(6, "planner ignores expands under way", planner_ignores_expands_under_way),
    Defect(6, "planner ignores planned expands", planner_ignores_planned_expands),
    Defect(7, "agent closes the door after the drain", agent_closes_the_door_after_the_drain),
    Defect(7, "agent sleeps without a drain", agent_sleeps_without_a_drain),
    Defect(8, "executor forgets deadlines", executor_forgets_deadlines),
    Defect(8, "scheduler looks at its timers too seldom", scheduler_looks_at_its_timers_too_seldom),
    Defect(9, "planner keeps no reservations", planner_keeps_no_reservations),
    Defect(9, "planner serves the newest first", planner_serves_the_newest_first),
    Defect(10, "executor loses a reaped pipeline", executor_loses_a_reaped_pipeline),
    Defect(10, "agent calls a failed sleep done", agent_calls_a_failed_sleep_done),
)

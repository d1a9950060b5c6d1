"""Defects to plant: two per invariant, patched into the planner, the executor or the agent, so that the checker can
prove that it finds them.

All plans of the runs in which they are found pass the plan validator: the defects sit in what happens to a plan, or
make plans that are sound but wrong. One sits in the simulated driver, because the duty is a driver's alone; it says
why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest

from nemo_rl.time_sharing.agents.agent import Agent, LocalPhase
from nemo_rl.time_sharing.log.state import PipelineState
from nemo_rl.time_sharing.planning import apportionment, plan, planner
from nemo_rl.time_sharing.planning.plan import PlanState
from nemo_rl.time_sharing.protocol.types import CommandOutcome, GivenBack, Priority, Verb
from nemo_rl.time_sharing.scheduling.executor import Executor
from nemo_rl.time_sharing.simulation.jobs import SimulatedJob
from nemo_rl.utils import record_events as rec

Patch = Callable[[pytest.MonkeyPatch], None]


class Defect(NamedTuple):
    """The invariant that it breaks, what it is, and how to plant it. `seed`: of the random scenario in which it is
    looked for first.
    """

    invariant: int
    name: str
    plant: Patch
    seed: int = 0


def agent_says_asleep_before_it_is(patch: pytest.MonkeyPatch) -> None:
    original = Agent._go_on

    def go_on(self, rank, command) -> None:  # type: ignore[no-untyped-def]
        if command.verb is Verb.VACATE and rank.phase is LocalPhase.SLEEPING:
            self._answer(command, CommandOutcome.DONE)
        original(self, rank, command)

    patch.setattr(Agent, "_go_on", go_on)


def agent_routes_stale_weights(patch: pytest.MonkeyPatch) -> None:
    original = Agent._go_on

    def go_on(self, rank, command) -> None:  # type: ignore[no-untyped-def]
        if rank.phase is LocalPhase.READY and rank.version < self.cached:
            rank.version = self.cached
        original(self, rank, command)

    patch.setattr(Agent, "_go_on", go_on)


def refresh_leaves_out_a_rank(patch: pytest.MonkeyPatch) -> None:
    original = Agent.refresh

    def refresh(self: Agent) -> None:
        hidden = next((rank for rank in self.ranks if rank.phase is LocalPhase.ROUTED), None)
        if hidden is not None:
            hidden.phase = LocalPhase.READY
        original(self)
        if hidden is not None:
            hidden.phase = LocalPhase.ROUTED

    patch.setattr(Agent, "refresh", refresh)


def agent_gives_back_when_the_cache_is_built(patch: pytest.MonkeyPatch) -> None:
    original = Agent.cache_built

    def cache_built(self: Agent, version: int) -> None:
        original(self, version)
        for cluster, held in self.holds.items():
            self._given_back[cluster] = GivenBack(cluster, held.epoch, self.published)
        self.send_status()

    patch.setattr(Agent, "cache_built", cache_built)


def planner_ignores_expands_under_way(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PipelineState, "waking", lambda self: False)


def agent_closes_the_door_after_the_drain(patch: pytest.MonkeyPatch) -> None:
    def unroute(self, rank, index) -> None:  # type: ignore[no-untyped-def]
        original(self, rank, index)
        self._host.process.generation.set_active(index, True)

    original = Agent._unroute
    patch.setattr(Agent, "_unroute", unroute)


def agent_sleeps_without_a_drain(patch: pytest.MonkeyPatch) -> None:
    original = Agent._go_on

    def go_on(self, rank, command) -> None:  # type: ignore[no-untyped-def]
        if rank.phase is LocalPhase.DRAINING:
            rank.phase = LocalPhase.SLEEPING
        original(self, rank, command)

    patch.setattr(Agent, "_go_on", go_on)


def executor_forgets_deadlines(patch: pytest.MonkeyPatch) -> None:
    def tick(self: Executor, *, isolated: bool) -> float:
        commands = self._state.commands
        for name, pending in commands.items():
            # A copy: the record has the command itself.
            commands[name] = replace(pending, deadline=pending.deadline + 1e6)
        return original(self, isolated=isolated)

    original = Executor.tick
    patch.setattr(Executor, "tick", tick)


def planner_keeps_no_reservations(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PlanState, "reserve", lambda self, gpus, reservation: None)


def planner_serves_the_newest_first(patch: pytest.MonkeyPatch) -> None:
    def newest_first(snapshot):  # type: ignore[no-untyped-def]
        return list(reversed(original(snapshot)))

    original = planner.queue
    patch.setattr(planner, "queue", newest_first)


def agent_calls_a_failed_sleep_done(patch: pytest.MonkeyPatch) -> None:
    def answer(self, command, outcome, version=-1, detail="") -> None:  # type: ignore[no-untyped-def]
        lie = outcome is CommandOutcome.FAILED and self.ranks[command.rank].phase is LocalPhase.SLEEPING
        original(self, command, CommandOutcome.DONE if lie else outcome, version, detail)

    original = Agent._answer
    patch.setattr(Agent, "_answer", answer)


def agent_tells_its_host_twice_of_a_grant(patch: pytest.MonkeyPatch) -> None:
    original = Agent.command

    def command(self: Agent, command) -> None:  # type: ignore[no-untyped-def]
        repeated = command.verb is Verb.GRANT and command.command in self._answers and command.cluster in self.holds
        original(self, command)
        if repeated and command.priority is Priority.ACTOR_TRAINING:
            self._host.granted(command.cluster, command.priority, command.step)

    patch.setattr(Agent, "command", command)


def agent_comes_back_one_version_behind(patch: pytest.MonkeyPatch) -> None:
    original = Agent.__init__

    def init(self, topology, incarnation, host, record, *, version=0, **options) -> None:  # type: ignore[no-untyped-def]
        original(self, topology, incarnation, host, record, version=max(version - 1, 0), **options)

    patch.setattr(Agent, "__init__", init)


def agent_calls_a_refresh_done_that_loads_nothing(patch: pytest.MonkeyPatch) -> None:
    def begin_refresh(self: Agent, index: int) -> None:
        self._record.emit(rec.SyncStarted(f"skipped.{index}.{self.cached}", self.cached, (index,), "refresh"))
        self._record.emit(rec.SyncFinished(f"skipped.{index}.{self.cached}", self.cached, "done"))
        self.ranks[index].version = self.cached
        self._refreshing.discard(index)

    patch.setattr(Agent, "_begin_refresh", begin_refresh)


def driver_admits_one_step_too_early(patch: pytest.MonkeyPatch) -> None:
    """In the simulated driver, because the staleness bound is kept by admission and only a driver admits; with sound
    admission, tokens are too old only when ranks serve old weights, which is the other defect of this invariant.
    """
    original = SimulatedJob._next_step

    def next_step(self, process) -> None:  # type: ignore[no-untyped-def]
        job = self.job
        self.job = job.model_copy(update={"staleness": job.staleness + 1})
        original(self, process)
        self.job = job

    patch.setattr(SimulatedJob, "_next_step", next_step)


def planner_begins_expands_while_training_is_next(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(apportionment, "_trains_next", lambda pipeline: False)


def agent_publishes_nothing_while_a_rank_falls_asleep(patch: pytest.MonkeyPatch) -> None:
    original = Agent._publish_if_refreshed

    def publish_if_refreshed(self: Agent) -> None:
        if (
            self._refresh_begun
            and not self._refreshing
            and any(rank.phase is LocalPhase.SLEEPING for rank in self.ranks)
        ):
            self._refresh_begun, self.published = False, self.cached
            self._host.refreshed(self.published)
        else:
            original(self)

    patch.setattr(Agent, "_publish_if_refreshed", publish_if_refreshed)


def agent_obeys_orders_that_are_over(patch: pytest.MonkeyPatch) -> None:
    original = Agent._take_rank_command

    def take_rank_command(self, rank, command) -> None:  # type: ignore[no-untyped-def]
        rank.epoch, rank.newest, rank.over = 0, (0, 0), -1
        original(self, rank, command)

    patch.setattr(Agent, "_take_rank_command", take_rank_command)


def executor_looks_at_one_command_at_a_time(patch: pytest.MonkeyPatch) -> None:
    original = Executor.tick

    def tick(self: Executor, *, isolated: bool) -> float:
        outgoing = dict(self._outgoing)
        for key in list(outgoing)[1:]:
            del self._outgoing[key]
        due = original(self, isolated=isolated)
        first = dict(self._outgoing)
        self._outgoing.clear()
        self._outgoing.update(
            {key: value for key, value in outgoing.items() if key in first or key in self._state.commands}
        )
        self._outgoing.update(first)
        return due

    patch.setattr(Executor, "tick", tick)


def executor_believes_a_reaper_that_failed(patch: pytest.MonkeyPatch) -> None:
    original = Executor._after_reap

    def after_reap(self, pipeline, pending, outcome) -> None:  # type: ignore[no-untyped-def]
        original(self, pipeline, pending, CommandOutcome.DONE)

    patch.setattr(Executor, "_after_reap", after_reap)


def planner_wakes_ranks_that_cool_off(patch: pytest.MonkeyPatch) -> None:
    def asleep(plan_state, pipeline):  # type: ignore[no-untyped-def]
        cooling, pipeline.cooling = pipeline.cooling, {}
        found = original(plan_state, pipeline)
        pipeline.cooling = cooling
        return found

    original = plan._asleep
    patch.setattr(plan, "_asleep", asleep)


def executor_leaves_superseded_commands_open(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Executor, "_end_command_of", lambda self, name, rank, outcome: None)


DEFECTS = (
    Defect(1, "agent obeys orders that are over", agent_obeys_orders_that_are_over, 36),
    Defect(1, "agent says asleep before it is", agent_says_asleep_before_it_is),
    Defect(2, "agent tells its host twice of a grant", agent_tells_its_host_twice_of_a_grant),
    Defect(2, "agent comes back one version behind", agent_comes_back_one_version_behind, 1),
    Defect(3, "agent routes stale weights", agent_routes_stale_weights, 11),
    Defect(3, "refresh leaves out a rank", refresh_leaves_out_a_rank),
    Defect(4, "driver admits one step too early", driver_admits_one_step_too_early),
    Defect(4, "agent calls a refresh done that loads nothing", agent_calls_a_refresh_done_that_loads_nothing),
    Defect(5, "agent gives back when the cache is built", agent_gives_back_when_the_cache_is_built),
    Defect(5, "agent publishes nothing while a rank sleeps", agent_publishes_nothing_while_a_rank_falls_asleep, 4),
    Defect(6, "planner ignores expands under way", planner_ignores_expands_under_way, 2),
    Defect(6, "planner begins expands while training is next", planner_begins_expands_while_training_is_next, 17),
    Defect(7, "agent closes the door after the drain", agent_closes_the_door_after_the_drain),
    Defect(7, "agent sleeps without a drain", agent_sleeps_without_a_drain),
    Defect(8, "executor forgets deadlines", executor_forgets_deadlines, 3),
    Defect(8, "executor looks at one command at a time", executor_looks_at_one_command_at_a_time, 7),
    Defect(9, "planner keeps no reservations", planner_keeps_no_reservations),
    Defect(9, "planner serves the newest first", planner_serves_the_newest_first),
    Defect(10, "executor believes a reaper that failed", executor_believes_a_reaper_that_failed),
    Defect(10, "agent calls a failed sleep done", agent_calls_a_failed_sleep_done, 1),
    Defect(11, "planner wakes ranks that cool off", planner_wakes_ranks_that_cool_off, 1),
    Defect(11, "executor leaves superseded commands open", executor_leaves_superseded_commands_open),
)

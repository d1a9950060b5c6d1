"""Known failures of earlier time-sharing schedulers, each as a case by name.

Where the failure was in a decision, the gap-ratio rule (kept for simulation) still shows it and the planner does not; where it was in carrying out,
the scheduler's core is driven by hand.
"""

from __future__ import annotations

from fleet import Fleet

from nemo_rl.time_sharing.plan import Plan, Snapshot
from nemo_rl.time_sharing.scheduler import Scheduler
from nemo_rl.time_sharing.simulation import gap_ratio
from nemo_rl.time_sharing.state import replay
from nemo_rl.time_sharing.steady_clock import SteadyClock
from nemo_rl.time_sharing.topology import Pool
from nemo_rl.time_sharing.types import ACTOR_INFER, ACTOR_TRAIN, Answer, Command, Demand, GivenBack, Held, Limits, Outcome, Phase, Priority, Status, Verb, Want
from nemo_rl.utils.record import MemoryRecord


def old_rule(fleet: Fleet, now: float = 100.0) -> Plan:
    return gap_ratio.plan(Snapshot.of(fleet.state), now)


def expanded(plan: Plan) -> set[str]:
    return {expand.pipeline for expand in plan.expands}


# In decisions: the old rule fails, ours passes.


def test_wasted_preemption_and_thrash() -> None:
    fleet = Fleet(3)
    fleet.add("a", [0, 1], [0, 1, 2])
    fleet.add("generator", [2], [0, 2], demand=100)
    fleet.add("trainer", [1], [0, 1, 2])
    fleet.wake("generator", 0)
    fleet.hold("trainer")
    fleet.want("a")
    assert old_rule(fleet).shrinks and not old_rule(fleet).grants
    assert not fleet.plan().shrinks


def test_a_narrow_request_overtakes_a_wide_one_for_ever() -> None:
    fleet = Fleet(4)
    fleet.add("wide", [0, 1, 2], [0, 1, 2, 3])
    fleet.add("narrow", [0], [0, 1, 2, 3])
    fleet.add("holder", [2], [0, 1, 2, 3])
    fleet.hold("holder")
    fleet.want("wide", Priority.INITIALIZATION, at=10.0)
    fleet.want("narrow", Priority.ACTOR_TRAINING, at=50.0)
    assert [grant.pipeline for grant in old_rule(fleet).grants] == ["narrow"]
    assert not fleet.plan().grants


def test_with_more_pipelines_than_gpus_the_newcomer_starves() -> None:
    fleet = Fleet(2)
    for name in ("a", "b", "newcomer"):
        fleet.add(name, [], [0, 1])
    for rank, name in enumerate(("a", "b")):
        fleet.demand(name, 100, 90)
        fleet.wake(name, rank)
    fleet.demand("newcomer", 100, at=50.0)
    assert "newcomer" not in expanded(old_rule(fleet))
    assert "newcomer" in expanded(fleet.plan())


def test_a_finished_pipeline_keeps_a_worker() -> None:
    fleet = Fleet(2)
    fleet.add("finished", [], [0])
    fleet.add("busy", [], [0, 1])
    fleet.demand("finished", 100, 100)
    fleet.wake("finished", 0)
    fleet.demand("busy", 100)
    fleet.wake("busy", 1)
    assert not old_rule(fleet).shrinks
    assert {(s.pipeline, s.rank) for s in fleet.plan().shrinks} == {("finished", 0)}


def test_a_pipeline_that_never_reported_neither_gives_nor_takes() -> None:
    fleet = Fleet(1)
    fleet.add("silent", [], [0])
    fleet.add("busy", [], [0], demand=100)
    fleet.wake("silent", 0)
    assert not old_rule(fleet).expands
    assert expanded(fleet.plan()) == {"busy"}


def test_more_than_a_thousand_activations_end_the_cluster() -> None:
    fleet = Fleet(1200)
    fleet.add("a", [0], list(range(1200)), demand=10_000)
    assert len(old_rule(fleet).expands) == 1000
    assert len(fleet.plan().expands) == 1200


def test_requiring_every_worker_before_waking_deadlocks() -> None:
    """A part of the ranks is a valid answer to a demand."""
    fleet = Fleet(3)
    fleet.add("a", [], [0, 1, 2], demand=100)
    fleet.add("b", [0], [0, 1])
    fleet.hold("b")
    assert {expand.rank for expand in fleet.plan().expands} == {1, 2}


def test_no_donor_is_put_to_sleep_for_a_receiver_that_proves_ineligible() -> None:
    fleet = Fleet(2)
    fleet.add("donor", [], [0, 1], demand=1)
    fleet.add("leaving", [], [0, 1], demand=100)
    fleet.wake("donor", 0, 1)
    fleet.state.pipelines["leaving"].leaving = True
    assert fleet.plan().empty


def test_one_gpu_is_not_counted_free_twice() -> None:
    fleet = Fleet(2)
    fleet.add("a", [0, 1], [0, 1])
    fleet.add("b", [0], [0, 1])
    fleet.add("generator", [], [0, 1], tp=2, demand=100)
    fleet.wake("generator", 0)
    fleet.want("a", at=1.0)
    fleet.want("b", at=2.0)
    plan = fleet.plan()
    assert [grant.pipeline for grant in plan.grants] == ["a"] and len(plan.shrinks) == 1


# In carrying out.


class Bench:
    """The scheduler's core with an obedient agent for every pipeline, unless told otherwise; the wire is the test."""

    def __init__(self, gpus: int = 4) -> None:
        self.record = MemoryRecord(clock=lambda: self.clock.now)
        self.clock = SteadyClock()
        self.inbox: list[Command] = []
        self.silent: set[str] = set()
        self.failing: set[tuple[str, Verb]] = set()
        self.sent: list[Command] = []
        self.seqs: dict[str, int] = {}
        self.now = 0.0
        self.scheduler = Scheduler(self.record, self.inbox.append, self.clock)
        self.scheduler.open(Pool(1, gpus), Limits(lease_s=1e6, plan_interval_s=0.0, quarantine_s=50.0), 0.0)

    @property
    def state(self):  # type: ignore[no-untyped-def]
        return self.scheduler.state

    def register(self, name: str, train: list[int], infer: list[int], incarnation: int = 0) -> None:
        self.scheduler.register(name, "ns", {ACTOR_TRAIN: 1, ACTOR_INFER: 1}, {ACTOR_TRAIN: train, ACTOR_INFER: infer}, self.now, incarnation=incarnation)

    def status(self, name: str, **fields: object) -> None:
        self.seqs[name] = self.seqs.get(name, 0) + 1
        self.scheduler.status(Status(name, self.state.pipelines[name].incarnation, self.seqs[name], term=self.state.term, **fields), self.now)  # type: ignore[arg-type]
        self.settle()

    def settle(self, seconds: float = 0.0) -> None:
        """Lets time pass in small steps and answers every command of agents that are not silent."""
        end = self.now + seconds
        while True:
            while self.inbox:
                self._answer(self.inbox.pop(0))
            if self.now >= end:
                return
            self.now = min(self.now + 1.0, end)
            self.scheduler.tick(self.now)

    def _answer(self, command: Command) -> None:
        self.sent.append(command)
        if command.pipeline in self.silent and command.verb is not Verb.REAP:
            return
        outcome = Outcome.FAILED if (command.pipeline, command.verb) in self.failing else Outcome.DONE
        self.scheduler.answer(Answer(command.command, command.pipeline, command.incarnation, outcome, 0 if command.verb is Verb.SYNC else -1), self.now)

    def phases(self, name: str) -> dict[int, str]:
        return {rank: awake.phase.value for rank, awake in self.state.pipelines[name].awake.items()}


def test_a_planned_release_during_a_hand_over_is_acknowledged_only_when_every_rank_sleeps() -> None:
    bench = Bench()
    bench.register("a", [0], [0, 1, 2])
    bench.silent.add("a")
    bench.status("a", demand=Demand(100, 0, 1, 1))
    assert set(bench.phases("a").values()) == {"waking"}
    bench.status("a", demand=Demand(0, 0, 1, 2), leaving=True)
    assert "a" in bench.state.pipelines and set(bench.phases("a").values()) == {"draining"}
    bench.silent.clear()
    bench.settle(5.0)
    assert "a" not in bench.state.pipelines and bench.state.owner == [None] * 4


def test_a_planned_release_with_nothing_awake_ends_at_once() -> None:
    bench = Bench()
    bench.register("a", [0], [0, 1])
    bench.status("a", leaving=True)
    assert not bench.state.pipelines


def test_a_release_counts_even_if_the_request_beside_it_is_refused() -> None:
    bench = Bench()
    bench.register("a", [0], [0, 1])
    bench.status("a", wants=(Want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 1, 0),))
    epoch = bench.state.pipelines["a"].held[ACTOR_TRAIN].epoch
    bench.status("a", given_back=(GivenBack(ACTOR_TRAIN, epoch, 1),), wants=(Want("critic", Priority.CRITIC_TRAINING, 2, 0),))
    assert not bench.state.pipelines["a"].held and bench.state.owner[0] is None


def test_a_failed_expand_leaves_the_books_true_and_the_donor_can_come_back() -> None:
    bench = Bench(2)
    bench.register("donor", [0], [0, 1])
    bench.register("taker", [1], [0, 1])
    bench.status("donor", demand=Demand(100, 0, 1, 1))
    assert bench.phases("donor") == {0: "active", 1: "active"}
    bench.failing.add(("taker", Verb.WAKE))
    bench.settle(20.0)
    bench.status("taker", demand=Demand(100, 0, 1, 1))
    bench.settle(5.0)
    assert bench.phases("taker") == {} and bench.state.pipelines["taker"].cooling
    bench.settle(30.0)
    assert bench.phases("donor") == {0: "active", 1: "active"}
    bench.failing.clear()
    bench.settle(100.0)
    assert bench.phases("taker")


def test_log_probs_to_training_never_frees_the_gpus_on_paper() -> None:
    bench = Bench(2)
    bench.register("a", [0], [0, 1])
    bench.register("b", [0], [0, 1])
    bench.status("a", wants=(Want(ACTOR_TRAIN, Priority.OLD_LOG_PROBS, 1, 0),))
    bench.status("b", wants=(Want(ACTOR_TRAIN, Priority.INITIALIZATION, 1, -1),))
    epoch = bench.state.pipelines["a"].held[ACTOR_TRAIN].epoch
    bench.status("a", holds=(Held(ACTOR_TRAIN, epoch, Priority.OLD_LOG_PROBS),), wants=(Want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 2, 0),))
    assert bench.state.owner[0].pipeline == "a" and bench.state.pipelines["a"].held[ACTOR_TRAIN].priority is Priority.ACTOR_TRAINING
    assert not bench.state.pipelines["b"].held


def test_one_slow_drain_does_not_hold_up_unrelated_pipelines() -> None:
    bench = Bench(4)
    bench.register("slow", [0], [0, 1])
    bench.register("taker", [0], [0, 1])
    bench.register("other", [2], [2, 3])
    bench.status("slow", demand=Demand(100, 0, 1, 1))
    bench.silent.add("slow")
    bench.status("taker", wants=(Want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 1, 0),))
    assert bench.phases("slow")[0] == "draining"
    bench.status("other", demand=Demand(100, 0, 1, 1), wants=(Want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 1, 0),))
    assert bench.state.pipelines["other"].held
    bench.settle(200.0)
    assert bench.state.pipelines["taker"].held, "the rank that never drained was ended"


def test_a_dead_pipeline_costs_nobody_else_and_its_gpus_come_back() -> None:
    bench = Bench(4)
    bench.state.limits = Limits(lease_s=10.0, plan_interval_s=0.0)
    bench.register("dead", [0], [0, 1])
    bench.register("alive", [0], [0, 1, 2, 3])
    bench.status("dead", wants=(Want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 1, 0),))
    for _ in range(20):
        bench.settle(2.0)
        bench.status("alive", demand=Demand(100, 0, 1, 1), wants=(Want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 1, 0),))
    assert "dead" not in bench.state.pipelines and bench.state.pipelines["alive"].held
    assert any(command.verb is Verb.REAP and command.pipeline == "dead" for command in bench.sent)


def test_gpus_whose_processes_cannot_be_ended_are_quarantined_and_come_back_when_they_can() -> None:
    bench = Bench(2)
    bench.state.limits = Limits(lease_s=10.0, reap_s=5.0, quarantine_s=30.0, plan_interval_s=0.0)
    bench.register("stuck", [0], [0, 1])
    bench.status("stuck", wants=(Want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 1, 0),))
    bench.failing.add(("stuck", Verb.REAP))
    bench.settle(30.0)
    assert bench.state.quarantined == {0} and "stuck" not in bench.state.pipelines
    bench.failing.clear()
    bench.settle(40.0)
    assert not bench.state.quarantined


def test_standing_demand_brings_the_ranks_back_after_a_preemption_without_a_watchdog() -> None:
    bench = Bench(2)
    bench.register("a", [0], [0, 1])
    bench.register("b", [0], [0, 1])
    bench.status("a", demand=Demand(100, 0, 1, 1))
    bench.status("b", wants=(Want(ACTOR_TRAIN, Priority.INITIALIZATION, 1, -1),))
    assert bench.phases("a") == {1: "active"}
    epoch = bench.state.pipelines["b"].held[ACTOR_TRAIN].epoch
    bench.status("b", given_back=(GivenBack(ACTOR_TRAIN, epoch, 0),))
    assert bench.phases("a") == {0: "active", 1: "active"}


def test_a_late_demand_does_not_raise_a_ghost() -> None:
    bench = Bench(2)
    bench.register("a", [0], [0, 1])
    bench.status("a", demand=Demand(0, 0, 1, 5))
    bench.status("a", demand=Demand(100, 0, 1, 4))
    assert bench.state.pipelines["a"].demand.remaining == 0 and not bench.phases("a")


def test_an_old_incarnation_is_taken_down_before_the_new_one_is_registered() -> None:
    bench = Bench(2)
    bench.register("a", [0], [0, 1])
    bench.register("a", [0], [0, 1])
    bench.status("a", wants=(Want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 1, 0),))
    try:
        bench.register("a", [0], [0, 1], incarnation=1)
        raise AssertionError("registered beside the old one")
    except ValueError as error:
        assert "still registered" in str(error)
    bench.settle(2.0)
    bench.register("a", [0], [0, 1], incarnation=1)
    assert bench.state.pipelines["a"].incarnation == 1


def test_the_log_folds_to_the_state_that_wrote_it() -> None:
    bench = Bench(4)
    bench.register("a", [0], [0, 1])
    bench.register("b", [2], [1, 2, 3])
    bench.status("a", demand=Demand(100, 0, 1, 1), wants=(Want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 1, 0),))
    bench.status("b", demand=Demand(50, 0, 1, 1))
    bench.settle(30.0)
    again = replay(bench.record.entries)
    for field in ("owner", "claims", "commands", "epoch", "term", "quarantined"):
        assert getattr(again, field) == getattr(bench.state, field), field
    assert {name: (p.awake, p.held, p.wants, p.demand) for name, p in again.pipelines.items()} == {
        name: (p.awake, p.held, p.wants, p.demand) for name, p in bench.state.pipelines.items()
    }
    assert all(phase in {p.value for p in Phase} for phase in bench.phases("a").values())
